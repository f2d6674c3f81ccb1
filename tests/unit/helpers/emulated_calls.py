"""Whole calls on an emulated driver: tests for a process of their own, whose driver it is."""

from __future__ import annotations

import random

import numpy as np
import pytest
from elsewhere import Twins, judge_copy
from emulated import Place, driver, make_stream, wait
from engines import (
    attention_model,
    counting_tensors,
    make_engine,
    untouched_tensors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from judging import examples
from producers import CUDA, CUDA_HOST, CUDA_MANAGED

from kvferry import KVCache, Route, copy, cuda
from kvferry.errors import LayoutError
from kvferry.testing import Scenario, apply_staged_descriptors
from kvferry.testing.strategies import scenarios

SHAPE = (6, 4, 3, 40)  # [blocks, tokens, heads, dim] items of 2 bytes
REPAIRS = {
    "kv_postprocess_blksize_on_receive": (2,),
    "kv_postprocess_layout_on_receive": (),
    "kv_postprocess_blksize_and_layout_on_receive": (2,),
}
LAYOUTS = {"source_layout": "BNHC", "target_layout": "BHNC"}


@pytest.fixture(autouse=True, scope="module")
def _driver():
    driver()


def numbers(shape=SHAPE, seed=1):
    return np.random.default_rng(seed).integers(0, 1 << 16, shape, np.uint16)


def places():
    """Return the pairs that can be copied between on streams of device 0."""
    return [
        (Place(0), Place(0)),
        (Place(1), Place(0)),
        (Place(None), Place(0)),
        (Place(0), Place(None)),
        (Place(0), Place(None, dlpack_device=(CUDA_HOST, 0))),
        (Place(0, dlpack_device=(CUDA_MANAGED, 0)), Place(0)),
    ]


PLACES = pytest.mark.parametrize("ends", places(), ids=str)


def test_the_emulated_driver_is_in_place():
    assert cuda.unavailable_reason() is None


@settings(max_examples=examples(4))
@given(scenarios(), st.sampled_from(places()))
def test_plans_write_what_is_due_when_their_stream_runs(
    scenario: Scenario, ends: tuple[Place, Place]
) -> None:
    stream = make_stream()
    judge_copy(scenario, ends, stream, lambda: wait(stream), runs_late=True)


@PLACES
def test_blocks_are_copied_between_layouts_on_a_stream(ends):
    source, target, stream = numbers(), np.zeros((5, 3, 4, 40), np.uint16), make_stream()
    from_, to = Twins([source], ends[0]), Twins([target], ends[1])
    copy.copy_blocks(from_.tensors[0], to.tensors[0], [5, 0], [1, 4], **LAYOUTS, stream=stream)
    assert not to.differ()
    wait(stream)
    to.fetch()
    assert np.array_equal(target[[1, 4]], source[[5, 0]].transpose(0, 2, 1, 3))
    assert not target[[0, 2, 3]].any() and not from_.differ()


@PLACES
def test_rows_are_copied_by_name_on_the_default_stream(ends):
    source, target = numbers(), np.zeros_like(numbers())
    from_, to = Twins([source], ends[0]), Twins([target], ends[1])
    copy.copy_kv_blocks({"a": from_.tensors[0]}, {"a": to.tensors[0]}, [5, 0], [1, 4], "h2d")
    assert not to.differ()
    wait(0)
    to.fetch()
    assert np.array_equal(target[[1, 4]], source[[5, 0]]) and not target[[0, 2, 3, 5]].any()


@pytest.mark.parametrize("place", [Place(0), Place(2)], ids=str)
@pytest.mark.parametrize("name", REPAIRS)
def test_repairs_are_those_of_host_memory_on_a_stream(name, place):
    ordinal = place.device[1]
    cache, stream = numbers(), make_stream(ordinal)
    twins, expected = Twins([cache], place), cache.copy()
    getattr(copy, name)(expected, [4, 1], *REPAIRS[name])
    getattr(copy, name)(twins.tensors[0], [4, 1], *REPAIRS[name], stream=stream)
    assert not twins.differ()
    wait(stream, ordinal)
    twins.fetch()
    assert np.array_equal(cache, expected)


def engines():
    """Return engines whose block sizes and layouts differ."""
    model = attention_model(layers=2, heads=3, dim=8)
    return make_engine("source", model, 4, "KBNHD"), make_engine("target", model, 6, "KBHND")


def test_what_was_staged_is_laid_out_on_a_stream():
    source_engine, target_engine = engines()
    plan = Route(source_engine, target_engine).plan(0, [[3, 0, 2]], [[1, 2]], tokens=(1, 11))
    sources, direct, target = (
        counting_tensors(source_engine), untouched_tensors(target_engine),
        untouched_tensors(target_engine),
    )  # fmt: skip
    source, stream = KVCache(source_engine, 0, sources), make_stream()
    plan.copy(source, KVCache(target_engine, 0, direct))
    to = Twins(target, Place(0))
    cache = KVCache(target_engine, 0, to.tensors)
    staged = plan.staged(source, cache)
    scratch = np.zeros(staged.scratch_bytes, np.uint8)
    apply_staged_descriptors(staged.descriptors, sources, scratch)
    for place in (Place(0), Place(None)):
        staged.finish(Twins([scratch], place).tensors[0], cache, stream=stream)
    assert not to.differ()
    wait(stream)
    to.fetch()
    assert all(np.array_equal(one, two) for one, two in zip(direct, target, strict=True))
    with pytest.raises(LayoutError, match=r"scratch.*not pinned"):
        staged.finish(scratch, cache, stream=stream)


def test_host_copies_have_finished_whatever_stream_is_named():
    source, target = numbers(), np.zeros_like(numbers())
    copy.copy_kv_blocks({"a": source}, {"a": target}, [5], [1], "h2d", stream=make_stream())
    assert np.array_equal(target[1], source[5])


def refusal(source_place, target_place, **options):
    """Return why rows between new tensors there are refused, with nothing written."""
    from_ = source_place
    if isinstance(source_place, Place):
        from_ = Twins([numbers()], source_place).tensors[0]
    to = Twins([np.zeros(SHAPE, np.uint16)], target_place)
    with pytest.raises((LayoutError, ValueError)) as refused:
        copy.copy_kv_blocks({"a": from_}, {"a": to.tensors[0]}, [5], [1], "h2d", **options)
    for ordinal in range(3):
        wait(0, ordinal)
    assert not to.differ()
    return str(refused.value)


def test_host_memory_that_is_not_pinned_is_refused_by_name():
    message = refusal(numbers(), Place(0), stream=make_stream())
    assert "src_kv_caches['a']" in message and "not pinned" in message


def test_a_stream_of_another_device_is_refused():
    message = refusal(Place(0), Place(0), stream=make_stream(2))
    assert message == "the stream belongs to cuda:2, the tensors lie on cuda:0"


def test_devices_without_access_to_each_other_are_refused():
    message = refusal(Place(2), Place(0), stream=make_stream(0))
    assert message == "cuda:0 has no peer access to cuda:2: copy through the host"


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (7, "is said to lie on cuda:7, but lies on cuda:0"),
        (1, "is said to lie on cuda:1, but lies on cuda:0"),
        (-1, "is said to lie on cuda:-1, but lies on cuda:0"),
    ],
)
def test_a_wrong_device_index_is_refused(index, says):
    message = refusal(Place(0, dlpack_device=(CUDA, index)), Place(0), stream=make_stream(0))
    assert says in message


def test_the_default_stream_of_no_device_is_refused():
    place = Place(0, dlpack_device=(CUDA, 7))
    assert refusal(place, place) == "device cuda:7 is none of the 3 devices here"


def test_a_plan_asks_once_and_only_about_what_it_moves():
    """A cache may hold what no stream can copy; where its other tensors lie is known then."""
    engines = [
        make_engine(name, attention_model(layers), 4, layout)
        for name, layers, layout in (("source", 3, "KBNHD"), ("target", 2, "KBHND"))
    ]
    plan = Route(*engines, allow_missing_layers=True).plan(0, [[3, 0]], [[1, 2]], tokens=(1, 8))
    sources, direct, target = (
        counting_tensors(engines[0]), untouched_tensors(engines[1]), untouched_tensors(engines[1])
    )  # fmt: skip
    plan.copy(KVCache(engines[0], 0, sources), KVCache(engines[1], 0, direct))
    pinned, to, stream = Twins(sources[:2], Place(None)), Twins(target, Place(0)), make_stream()
    ends = (
        KVCache(engines[0], 0, [*pinned.tensors, sources[2]]),
        KVCache(engines[1], 0, to.tensors),
    )
    asked = []
    for _ in range(2):
        plan.copy(*ends, stream=stream)
        asked.append(driver().kvferry_emulated_questions())
    assert asked[0] == asked[1]
    wait(stream)
    to.fetch()
    assert all(np.array_equal(one, two) for one, two in zip(direct, target, strict=True))


def test_the_host_waits_for_nothing_though_many_calls_are_in_flight():
    """Two streams run in the order of their waits, each with the tables of its own calls."""
    streams = [make_stream(), make_stream()]
    rng = random.Random(3)
    calls = []
    for number in range(30):
        source, target = numbers(seed=number), np.zeros(SHAPE, np.uint16)
        ids = rng.sample(range(6), 3), rng.sample(range(6), 3)
        ends = Twins([source], Place(0)), Twins([target], Place(0))
        copy.copy_kv_blocks(
            {"a": ends[0].tensors[0]}, {"a": ends[1].tensors[0]}, *ids, "d2h",
            stream=streams[number % 2],
        )  # fmt: skip
        calls.append((source, target, ids, ends))
    for first in (1, 0):
        wait(streams[first])
        for source, target, (source_ids, target_ids), (_, to) in calls[first::2]:
            to.fetch()
            assert np.array_equal(target[target_ids], source[source_ids])
        if first:
            assert not any(to.differ() for *_, (_, to) in calls[0::2])


def test_a_calibration_measures_both_ways_and_says_where_one_takes_over(monkeypatch):
    monkeypatch.setattr(cuda, "_CALIBRATION_BYTES", 4 << 20)  # copied by one thread here
    calibration = cuda.calibrate()
    for bus in (calibration.upload, calibration.download):
        sizes = [speeds.num_bytes for speeds in bus.fragments]
        assert sizes == [1 << power for power in range(8, 23)]
        assert all(min(speeds.kernel, speeds.engine, bus.plain) > 1e3 for speeds in bus.fragments)
    upload, download, pieces = calibration.thresholds().values()
    never = 2**63 - 1
    assert {upload, download} <= {*sizes, never}
    assert pieces in {1 << power for power in range(10)}
    for device, error in ((3, LayoutError), (2**40, LayoutError), (-1, ValueError)):
        with pytest.raises(error):
            cuda.calibrate(device)
