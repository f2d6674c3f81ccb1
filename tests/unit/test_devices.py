"""Tensors in memory of GPUs, as far as a machine without one can tell: what needs no copy works."""

from __future__ import annotations

import numpy as np
import pytest
from engines import attention_model, label, make_engine
from producers import CPU, CUDA, CUDA_HOST, CUDA_MANAGED, Producer

from kvferry import KVCache, Route, copy, cuda, wire
from kvferry.cache import RankDescription
from kvferry.errors import LayoutError

ENGINE = make_engine("source", attention_model(heads=2))  # [blocks, 4, 2, 8] items of 2 bytes
TARGET = make_engine("target", attention_model(heads=2))
SHAPE, STRIDES = (10, 4, 2, 8), (64, 16, 8, 1)
PLAN = Route(ENGINE, TARGET).plan(0, [[1]], [[2]], tokens=(0, 4))

without_devices = pytest.mark.skipif(cuda.available(), reason="there is a GPU to copy with")


kept = []  # a producer must outlive the caches that give its tensor back


def producer(device, **options):
    kept.append(Producer(SHAPE, STRIDES, device=device, **options))
    return kept[-1]


@pytest.mark.parametrize("device", [(CUDA, 0), (CUDA, 3), (CUDA_MANAGED, 1)])
@pytest.mark.parametrize("knows_versions", [True, False])
def test_device_memory_is_registered_without_waiting_for_it(device, knows_versions):
    tensor = producer(device, knows_versions=knows_versions)
    cache = KVCache(ENGINE, 0, [tensor])
    assert tensor.options["stream"] == -1
    description = cache.describe()
    assert description.slots[0].device == device
    assert wire.decode(wire.encode(description), RankDescription) == description


@pytest.mark.parametrize("device", [(CPU, 0), (CUDA_HOST, 0)])
def test_host_memory_is_asked_for_no_stream(device):
    tensor = producer(device)
    KVCache(ENGINE, 0, [tensor])
    assert "stream" not in tensor.options


def test_descriptors_and_explanations_need_no_device():
    source = KVCache(ENGINE, 0, [producer((CUDA, 0))])
    target = KVCache(TARGET, 0, [producer((CUDA, 1))])
    descriptors = PLAN.descriptors(source, target)
    assert (descriptors.source_offset.tolist(), descriptors.length.tolist()) == ([128], [128])
    assert len(PLAN.loops(source, target)) == 1
    assert PLAN.explain(source, target).num_bytes == 128


@without_devices
@pytest.mark.parametrize("ends", [((CUDA, 0), (CPU, 0)), ((CPU, 0), (CUDA, 0))])
def test_copies_of_device_memory_say_what_is_missing(ends):
    tensors = [producer(device) for device in ends]
    source, target = KVCache(ENGINE, 0, [tensors[0]]), KVCache(TARGET, 0, [tensors[1]])
    reason = cuda.unavailable_reason()
    with pytest.raises(LayoutError) as refused:
        PLAN.copy(source, target, stream=0)
    assert reason in str(refused.value)
    layout = {"source_layout": "BNHC", "target_layout": "BNHC"}
    with pytest.raises(LayoutError) as refused:
        copy.copy_blocks(*tensors, [1], [2], **layout)
    assert reason in str(refused.value)
    with pytest.raises(LayoutError) as refused:
        copy.copy_kv_blocks({"a": tensors[0]}, {"a": tensors[1]}, [1], [2], "d2h")
    assert reason in str(refused.value)
    with pytest.raises(LayoutError) as refused:
        copy.kv_postprocess_layout_on_receive(producer((CUDA, 0)), [1])
    assert reason in str(refused.value)
    assert not any(any(tensor.memory) for tensor in tensors)


def test_an_empty_plan_needs_no_device():
    plan = Route(ENGINE, TARGET).plan(0, [[1]], [[2]], tokens=(0, 0))
    source, target = (KVCache(e, 0, [producer((CUDA, 0))]) for e in (ENGINE, TARGET))
    plan.copy(source, target)


@pytest.mark.parametrize("stream", [-1, 2**63, 1.5, "0", True, False, object()], ids=label)
def test_streams_are_numbers(stream):
    memory = np.zeros((3, 2))
    with pytest.raises(ValueError, match=r"stream=.*pass its handle, such as .*cuda_stream"):
        copy.copy_kv_blocks({"a": memory}, {"a": memory}, [0], [1], "h2d", stream=stream)


class OnDevice:
    """Block ids on a device, which numpy cannot read."""

    def __init__(self, ids, method):
        setattr(self, method, lambda: np.asarray(ids))

    def __dlpack_device__(self):
        return (CUDA, 0)

    def __array__(self, *arguments, **options):
        raise TypeError("can't convert a CUDA tensor to numpy")


@pytest.mark.parametrize("method", ["cpu", "get"])
def test_ids_on_a_device_are_brought_to_the_host(method):
    source, target = np.arange(6).reshape(3, 2), np.zeros((4, 2), int)
    ids = OnDevice([2, 0], method), OnDevice([1, 3], method)
    copy.copy_kv_blocks({"a": source}, {"a": target}, *ids, "d2h")
    assert target.tolist() == [[0, 0], [4, 5], [0, 0], [0, 1]]
    with pytest.raises(ValueError, match="src_block_ids is no list of block ids"):
        copy.copy_kv_blocks({"a": source}, {"a": target}, OnDevice([2], "numpy"), [1], "d2h")
