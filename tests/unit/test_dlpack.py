"""The import of other libraries' tensors: what is believed, and that each is given back once."""

from __future__ import annotations

import collections.abc
import gc

import numpy as np
import pytest
from engines import attention_model, make_engine, rows, source_cache, target_cache
from producers import CPU, CUDA, CUDA_HOST, IS_COPIED, READ_ONLY, ROCM, Producer

from kvferry import KVCache, Route
from kvferry.errors import LayoutError

ENGINE = make_engine("source", attention_model(heads=2))  # [blocks, 4, 2, 8] items of 2 bytes
TWO_LAYERS = make_engine("source", attention_model(layers=2, heads=2))
SHAPE = (10, 4, 2, 8)
STRIDES = (64, 16, 8, 1)


def register(*producers, engine=ENGINE):
    return KVCache(engine, 0, producers)


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("knows_versions", [True, False])
def test_a_tensor_is_given_back_once_when_its_cache_dies(versioned, knows_versions):
    producer = Producer(SHAPE, STRIDES, versioned=versioned, knows_versions=knows_versions)
    cache = register(producer)
    assert (producer.exported, producer.deleted) == (1, 0)
    assert producer.is_consumed
    gc.collect()
    assert producer.deleted == 0
    del cache
    assert producer.deleted == 1
    producer.capsule = None  # the capsule's own death is none of the tensor's
    gc.collect()
    assert producer.deleted == 1


@pytest.mark.parametrize("versioned", [True, False])
def test_an_error_that_unwinds_a_cache_comes_through(versioned):
    producer = Producer(SHAPE, STRIDES, versioned=versioned)
    with pytest.raises(ZeroDivisionError):
        # The cache lies on the frame's stack, which is cleared with the error set.
        (register(producer), 1 / 0)
    assert producer.deleted == 1


def test_a_deleter_that_fails_leaves_no_error_behind(monkeypatch):
    def fail():
        raise RuntimeError("no")

    unraisable = []
    monkeypatch.setattr("sys.unraisablehook", unraisable.append)
    producer = Producer(SHAPE, STRIDES, on_delete=fail)
    with pytest.raises(ZeroDivisionError):
        (register(producer), 1 / 0)
    assert [type(caught.exc_value) for caught in unraisable] == [RuntimeError]


def test_a_producer_without_a_deleter_is_let_go():
    producer = Producer(SHAPE, STRIDES, has_deleter=False)
    register(producer)
    assert producer.deleted == 0


@pytest.mark.parametrize("versioned", [True, False])
def test_missing_strides_mean_row_major(versioned):
    producer = Producer(SHAPE, None, versioned=versioned)
    (slot,) = register(producer).describe().slots
    assert (slot.address, slot.sizes, slot.strides) == (producer.address, SHAPE, (128, 32, 16, 2))


def test_the_byte_offset_counts():
    producer = Producer(SHAPE, STRIDES, byte_offset=96)
    (slot,) = register(producer).describe().slots
    assert slot.address == producer.address + 96


@pytest.mark.parametrize(("flags", "writable"), [(0, True), (READ_ONLY, False), (1 << 40, True)])
def test_the_read_only_flag_decides_who_may_be_a_target(flags, writable):
    producer = Producer(SHAPE, STRIDES, flags=flags)
    cache = register(producer)
    assert cache.describe().slots[0].writable is writable
    target = make_engine("target", attention_model(heads=2))
    Route(ENGINE, target).plan(0, [[1]], [[2]], tokens=(0, 4)).copy(cache, target_cache(target))
    backwards = Route(target, ENGINE).plan(0, [[1]], [[2]], tokens=(0, 4))
    if writable:
        backwards.copy(source_cache(target), cache)
        assert any(producer.memory)
    else:
        with pytest.raises(LayoutError, match="read-only"):
            backwards.copy(source_cache(target), cache)
        assert not any(producer.memory)


@pytest.mark.parametrize("stated", [(CPU, 0), (CUDA_HOST, 0)])
def test_pinned_host_memory_is_host_memory(stated):
    producer = Producer(SHAPE, STRIDES, device=stated)
    assert register(producer).describe().slots[0].device == stated


BAD = {
    "a new major version": ({"major": 2}, "version 2"),
    "an old major version": ({"major": 0}, "version 0"),
    "a copy": ({"flags": IS_COPIED}, "copied"),
    "no dimensions": ({"dimensions": 0}, "0 dimensions"),
    "negative dimensions": ({"dimensions": -1}, "-1 dimensions"),
    "wild dimensions": ({"dimensions": 2**31 - 1}, "2147483647 dimensions"),
    "one dimension less": ({"dimensions": 3}, "3 dimensions"),
    "no shape": ({"null_shape": True}, "no shape"),
    "no memory": ({"null_data": True}, "no memory"),
    "an offset that wraps": ({"byte_offset": 2**64 - 1}, "offset"),
    "half a byte": ({"bits": 4}, "4 bits"),
    "no bits": ({"bits": 0}, "0 bits"),
    "no lanes": ({"lanes": 0}, "0 bits"),
    "items of four bytes": ({"lanes": 2}, "4 bytes"),
    "items of one byte": ({"bits": 8}, "1 byte,"),
    "another device than stated": ({"device": (CUDA, 0), "stated_device": (CPU, 0)}, "cuda:0"),
}


# An unversioned capsule has neither a version nor flags that could make no sense.
BAD_CAPSULES = [
    pytest.param(fields, message, versioned, id=f"{name}{'' if versioned else ', unversioned'}")
    for name, (fields, message) in BAD.items()
    for versioned in (True, False)
    if versioned or not fields.keys() & {"major", "flags"}
]


@pytest.mark.parametrize(("fields", "message", "versioned"), BAD_CAPSULES)
def test_what_makes_no_sense_is_refused_and_given_back(fields, message, versioned):
    producer = Producer(SHAPE, STRIDES, versioned=versioned, **fields)
    with pytest.raises(LayoutError, match=message) as caught:
        register(producer)
    assert "layers.0" in str(caught.value)
    del caught
    assert producer.deleted == 1


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((-1, 4, 2, 8), STRIDES),
        ((-(2**63), 4, 2, 8), STRIDES),
        ((2**63 - 1, 4, 2, 8), STRIDES),
        ((2**63 - 1, 4, 2, 8), None),
        ((2**62, 4, 2, 8), None),
        ((10, 2**62, 2, 8), None),
        (SHAPE, (2**63 - 1, 16, 8, 1)),
        (SHAPE, (2**62, 16, 8, 1)),
        (SHAPE, (2**61, 2**60, 8, 1)),
        (SHAPE, (-64, 16, 8, 1)),
        (SHAPE, (-(2**63), 16, 8, 1)),
        (SHAPE, (0, 16, 8, 1)),
        (SHAPE, (63, 16, 8, 1)),
        (SHAPE, (64, 8, 32, 1)),
        (SHAPE, (128, 32, 16, 2)),
        (SHAPE, (64, 16, 8, -1)),
        (SHAPE, (64, 16, 8, 0)),
    ],
)
def test_sizes_and_strides_that_lie_are_refused(shape, strides):
    producer = Producer(shape, strides)
    with pytest.raises(LayoutError):
        register(producer)
    assert producer.deleted == 1


@pytest.mark.parametrize("wild", [0, -1, 2**40, -(2**63), 2**63 - 1])
def test_the_stride_of_an_axis_of_size_one_is_not_looked_at(wild):
    producer = Producer((1, 4, 2, 8), (wild, 16, 8, 1))
    (slot,) = register(producer).describe().slots
    assert slot.strides == (0, 32, 16, 2)


def test_no_blocks_need_no_memory():
    producer = Producer((0, 4, 2, 8), None, null_data=True)
    (slot,) = register(producer).describe().slots
    assert slot.sizes == (0, 4, 2, 8)


def test_a_capsule_is_taken_once():
    producer = Producer(SHAPE, STRIDES)
    cache = register(producer)

    class Again:
        def __dlpack_device__(self):
            return (CPU, 0)

        def __dlpack__(self, **options):
            return producer.capsule

    with pytest.raises(LayoutError, match="no unused DLPack capsule"):
        register(Again())
    assert producer.deleted == 0
    del cache
    assert producer.deleted == 1


@pytest.mark.parametrize("exported", [None, 5, b"dltensor", object()])
def test_an_export_that_is_no_capsule_is_refused_by_name(exported):
    class Liar:
        def __dlpack_device__(self):
            return (CPU, 0)

        def __dlpack__(self, **options):
            return exported

    with pytest.raises((TypeError, LayoutError), match=r"layers.0"):
        register(Liar())


def test_tensors_that_came_before_a_bad_one_are_given_back():
    good, bad = Producer(SHAPE, STRIDES), Producer(SHAPE, STRIDES, bits=8)
    with pytest.raises(LayoutError, match=r"layers\.1"):
        register(good, bad, engine=TWO_LAYERS)
    assert (good.deleted, bad.deleted) == (1, 1)
    for failing in (None, 5, Producer(SHAPE, STRIDES, device=(ROCM, 0))):
        good = Producer(SHAPE, STRIDES)
        with pytest.raises((TypeError, LayoutError)):
            register(good, failing, engine=TWO_LAYERS)
        assert good.deleted == 1


def test_tensors_after_a_bad_one_are_not_exported():
    bad, later = Producer(SHAPE, STRIDES, major=2), Producer(SHAPE, STRIDES)
    with pytest.raises(LayoutError, match=r"layers\.0"):
        register(bad, later, engine=TWO_LAYERS)
    assert (bad.deleted, later.exported) == (1, 0)


def test_one_producer_may_fill_two_slots():
    producer = Producer(SHAPE, STRIDES)
    cache = register(producer, producer, engine=TWO_LAYERS)
    del cache
    assert producer.deleted == 2  # exported twice, given back twice


@pytest.mark.parametrize(
    "raised", [TypeError("no"), ValueError("no"), BufferError("no"), RuntimeError("no")]
)
def test_a_producer_that_cannot_export_is_refused(raised):
    class Failing:
        def __dlpack_device__(self):
            return (CPU, 0)

        def __dlpack__(self, **options):
            raise raised

    with pytest.raises(LayoutError, match=r"layers\.0.*cannot be exported: no"):
        register(Failing())


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_not_swallowed(raised):
    class Interrupted:
        def __dlpack_device__(self):
            return (CPU, 0)

        def __dlpack__(self, **options):
            raise raised

    with pytest.raises(raised):
        register(Interrupted())


@pytest.mark.parametrize(
    "device", [None, 5, (), (1,), ("cpu", 0), (1.0, 0), (2**40, 0), (1, -(2**40)), (2**200, 0)]
)
def test_a_device_that_is_none_is_refused_by_name(device):
    producer = Producer(SHAPE, STRIDES)
    producer._device = device
    with pytest.raises((TypeError, LayoutError), match=r"layers.0"):
        register(producer)
    assert producer.exported == 0


@pytest.mark.parametrize("device", [(ROCM, 0), (7, 1), (0, 0), (99, -1)])
def test_memory_of_other_devices_is_refused_before_it_is_exported(device):
    producer = Producer(SHAPE, STRIDES, device=device)
    with pytest.raises(LayoutError, match=rf"layers\.0.*\({device[0]}, {device[1]}\)"):
        register(producer)
    assert (producer.exported, producer.deleted) == (0, 0)


@pytest.mark.parametrize(
    ("kind", "name"),
    [(4, "OpenCL"), (7, "Vulkan"), (8, "Metal"), (ROCM, "ROCm"), (11, "ROCm host"), (14, "oneAPI")],
)
def test_devices_that_frameworks_export_are_named(kind, name):
    producer = Producer(SHAPE, STRIDES, device=(kind, 1))
    with pytest.raises(LayoutError, match=rf"is on {name}, DLPack device \({kind}, 1\);"):
        register(producer)


def test_a_device_without_an_export_is_refused_by_name():
    class Half:
        def __dlpack_device__(self):
            return (CPU, 0)

    with pytest.raises(TypeError, match=r"layers.0"):
        register(Half())


@pytest.mark.parametrize("given", [None, 5, [1.0], "tensor", b"bytes", object()])
def test_what_speaks_no_dlpack_is_refused_by_name(given):
    with pytest.raises(TypeError, match=r"layers\.0.*does not speak DLPack"):
        register(given)


def test_tensors_stay_alive_while_a_copy_reads_them():
    """A sequence may make its caches on the way; they must then live until the last byte moved."""
    target = make_engine("target", attention_model(heads=2))
    written = np.zeros(SHAPE, np.uint16)
    producers = []
    had_written = []

    class Passing(collections.abc.Sequence):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            if index:
                raise IndexError
            on_delete = lambda: had_written.append(bool(written.any()))  # noqa: E731
            producer = Producer(SHAPE, STRIDES, on_delete=on_delete)
            producer.memory[:] = b"\7" * len(producer.memory)
            producers.append(producer)
            return register(producer)

    plan = Route(ENGINE, target).plan(0, [[1]], [[2]], tokens=(0, 4))
    plan.copy(Passing(), KVCache(target, 0, [written]))
    gc.collect()
    assert [producer.deleted for producer in producers] == [1]
    assert had_written == [True], "the source's tensor was given back before its bytes were read"


def test_a_plan_and_its_descriptors_keep_no_tensor_alive():
    producer = Producer(SHAPE, STRIDES)
    target = make_engine("target", attention_model(heads=2))
    cache = register(producer)
    plan = Route(ENGINE, target).plan(0, [[1]], [[2]], tokens=(0, 4))
    descriptors = plan.descriptors(cache, target_cache(target))
    assert rows(descriptors) == [(0, 128, 0, 256, 128)]
    del cache
    assert producer.deleted == 1
