"""Copies on several threads, and what other threads may do meanwhile."""

from __future__ import annotations

import threading
import time
import weakref

import numpy as np
import pytest
from engines import (
    attention_model,
    counting_tensors,
    label,
    make_engine,
    source_cache,
    target_cache,
    untouched_tensors,
)
from threads import assert_other_threads_run

from kvferry import KVCache, Route, copy


def big_plan(blocks=1100):
    """Make a plan that moves more than four threads' worth, re-laying out on the way: 69 MiB."""
    model = attention_model(layers=2, heads=4, dim=64)
    source, target = (
        make_engine("source", model, 32, "KBNHD"),
        make_engine("target", model, 24, "KBHND"),
    )
    rng = np.random.default_rng(7)
    source_ids, target_ids = rng.permutation(blocks), rng.permutation(blocks * 4 // 3 + 1)
    plan = Route(source, target).plan(0, [source_ids], [target_ids], tokens=(5, blocks * 32 - 3))
    return plan, source, target


def test_any_number_of_threads_gives_the_same_bytes():
    plan, source, target = big_plan()
    assert plan.num_bytes > 64 << 20
    sources = source_cache(source, blocks=1100)
    results = []
    for threads in (1, 2, 3, 1000, 2**62, None):
        written = untouched_tensors(target, blocks=1468)
        plan.copy(sources, KVCache(target, 0, written), threads=threads)
        results.append(written)
    for other in results[1:]:
        for one, same in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(same, one)
    moved = sum(int((tensor != 0xEEEE).sum()) for tensor in results[0])
    # Source numbers pass 0xEEEE now and then, which hides them here: one in 65521.
    assert plan.num_bytes // 2 * 0.9999 < moved <= plan.num_bytes // 2


# Rows of an odd length, as many bytes as five threads share.
ROWS = np.random.default_rng(3).integers(0, 256, (70, 6, 2, 25_501), np.uint8)
IDS = np.random.default_rng(4).permutation(len(ROWS))
REPAIRS = {
    "kv_postprocess_blksize_on_receive": (3,),
    "kv_postprocess_layout_on_receive": (),
    "kv_postprocess_blksize_and_layout_on_receive": (3,),
}


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_every_call_takes_a_number_of_threads(threads):
    expected = np.empty_like(ROWS)
    expected[IDS] = ROWS
    target = np.zeros_like(ROWS)
    copy.copy_kv_blocks({"a": ROWS}, {"a": target}, range(70), IDS, "d2h", threads=threads)
    np.testing.assert_array_equal(target, expected)
    target = np.zeros((70, 2, 6, 25_501), np.uint8)
    layouts = {"source_layout": "BNHC", "target_layout": "BHNC"}
    copy.copy_blocks(ROWS[..., :-1], target[..., :-1], range(70), IDS, **layouts, threads=threads)
    np.testing.assert_array_equal(target[..., :-1].transpose(0, 2, 1, 3), expected[..., :-1])
    assert not target[..., -1].any()


@pytest.mark.parametrize("name", REPAIRS)
def test_repairs_are_the_same_on_any_number_of_threads(name):
    results = []
    for threads in (1, 2, 3, 4):
        cache = ROWS.copy()
        getattr(copy, name)(cache, IDS[:60], *REPAIRS[name], threads=threads)
        results.append(cache)
    assert not np.array_equal(results[0], ROWS)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@pytest.fixture
def default_threads():
    yield
    copy.set_num_threads(None)


@pytest.mark.usefixtures("default_threads")
def test_the_number_for_calls_that_do_not_say():
    usual = copy.get_num_threads()
    assert 1 <= usual <= 16
    for threads, used in [(1, 1), (2, 2), (np.int64(3), 3), (16, 16), (17, 16), (2**63 - 1, 16)]:
        assert copy.set_num_threads(threads) is None
        assert copy.get_num_threads() == used
        target = np.zeros_like(ROWS)
        copy.copy_kv_blocks({"a": ROWS}, {"a": target}, IDS, IDS, "d2h")
        np.testing.assert_array_equal(target, ROWS)
    copy.set_num_threads(None)
    assert copy.get_num_threads() == usual


@pytest.mark.usefixtures("default_threads")
@pytest.mark.parametrize("threads", [0, -1, -(2**70), 2**63, 2**70, 1.0, "2", [2]], ids=label)
def test_what_is_no_number_of_threads(threads):
    copy.set_num_threads(5)
    with pytest.raises(ValueError, match="threads="):
        copy.set_num_threads(threads)
    assert copy.get_num_threads() == 5
    target, rows = np.zeros((2, 4), np.uint8), np.ones((2, 4), np.uint8)
    with pytest.raises(ValueError, match="threads="):
        copy.copy_kv_blocks({"a": rows}, {"a": target}, [0], [0], "h2d", threads=threads)
    layouts = {"source_layout": "BD", "target_layout": "BD"}
    with pytest.raises(ValueError, match="threads="):
        copy.copy_blocks(rows, target, [0], [0], **layouts, threads=threads)
    cache = np.arange(24, dtype=np.uint8).reshape(2, 3, 4, 1)
    for name, ratio in REPAIRS.items():
        with pytest.raises(ValueError, match="threads="):
            getattr(copy, name)(cache, [0], *ratio, threads=threads)
    assert not target.any()
    assert (cache.ravel() == np.arange(24)).all()


def test_other_threads_run_while_bytes_move():
    plan, source, target = big_plan()
    ends = source_cache(source, blocks=1100), target_cache(target, blocks=1468)
    plan.copy(*ends, threads=1)  # touch the memory once
    assert_other_threads_run(lambda: plan.copy(*ends, threads=1))


def test_the_same_caches_serve_two_copies_at_once():
    plan, source, target = big_plan(300)
    sources = source_cache(source, blocks=300)
    results = [untouched_tensors(target, blocks=401) for _ in range(3)]
    threads = [
        threading.Thread(target=plan.copy, args=(sources, KVCache(target, 0, written)))
        for written in results
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for other in results[1:]:
        for one, same in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(same, one)


def test_caches_let_go_during_a_copy_keep_their_memory():
    """Another thread may empty the list of caches while their bytes move."""
    plan, source, target = big_plan(600)
    written, expected = (untouched_tensors(target, blocks=801) for _ in range(2))
    plan.copy(source_cache(source, blocks=600), KVCache(target, 0, expected))
    had_finished = []

    def is_finished(_):
        had_finished.append(all(map(np.array_equal, written, expected)))

    tensors = counting_tensors(source, blocks=600)
    watched = weakref.ref(tensors[0], is_finished)
    sources = [KVCache(source, 0, tensors)]
    del tensors

    def empty_the_list():
        # The copy has begun once anything is written; what is left of it takes milliseconds.
        while (written[0] == 0xEEEE).all():
            time.sleep(0)
        sources.clear()

    thread = threading.Thread(target=empty_the_list)
    thread.start()
    plan.copy(sources, KVCache(target, 0, written), threads=1)
    thread.join()
    assert watched() is None
    assert had_finished == [True], "the source's memory was let go before the copy had finished"
