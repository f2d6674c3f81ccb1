"""Streams: what a call leaves for them to do, in which order, and beside what."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from gpus import BY_ENDS, GPU, PINNED, content, on_gpu
from relayouts import SHAPE, Relayout

pytestmark = on_gpu

# A quarter of a second at the fastest clocks, which no call takes to enqueue its work.
LONG_CYCLES = 500_000_000
# [blocks, tokens, heads, dim]: tables of some hundred bytes, and of two thirds of a MiB; pieces of
# 256 KiB, which go over the bus by the copy engine.
FEW, MANY, LARGE = (24, 4, 3, 64), (1 << 16, 1, 1, 64), (64, 1, 1, 1 << 17)
WAYS = pytest.mark.parametrize(
    ("ends", "shape"),
    [
        ((GPU, GPU), FEW),
        ((GPU, GPU), MANY),
        ((GPU, GPU), LARGE),
        ((PINNED, GPU), FEW),
        ((PINNED, GPU), MANY),
        ((PINNED, GPU), LARGE),
        ((GPU, PINNED), FEW),
        ((GPU, PINNED), MANY),
        ((GPU, PINNED), LARGE),
    ],
    ids=str,
)


def busy_stream():
    """Return a stream that sleeps, and an event for when it has."""
    stream, slept = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
    slept.record(stream)
    return stream, slept


@WAYS
def test_a_call_with_new_ids_returns_while_its_stream_is_busy(ends, shape):
    known, new = (Relayout(ends, shape, seed) for seed in (1, 2))
    known.copy(None)  # loads the kernels; its tables are of no use to the other call
    torch.cuda.synchronize()
    stream, slept = busy_stream()
    new.copy(stream.cuda_stream)
    assert not slept.query(), "the call waited for its stream"
    stream.synchronize()
    assert new.is_copied()


@WAYS
def test_a_stream_does_not_wait_for_a_busy_one(ends, shape):
    known, late, early = (Relayout(ends, shape, seed) for seed in (1, 2, 3))
    known.copy(None)
    torch.cuda.synchronize()
    busy, slept = busy_stream()
    free = torch.cuda.Stream()
    late.copy(busy.cuda_stream)
    early.copy(free.cuda_stream)
    free.synchronize()
    assert not slept.query(), "one stream's copy came after the other's"
    assert not busy.query()
    assert early.is_copied()
    busy.synchronize()
    assert late.is_copied()


@pytest.mark.parametrize("number", ["a stream of its own", None, 0, 1, 2], ids=str)
def test_work_before_and_after_on_the_stream_is_ordered(number):
    """Torch's default stream is the legacy one, with which the per-thread one is ordered, too."""
    case = Relayout()
    is_default = number is None or isinstance(number, int)
    stream = torch.cuda.default_stream() if is_default else torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        case.from_.add_(1)
        case.copy(number if is_default else stream.cuda_stream)
        after = case.to + 1
    stream.synchronize()
    case.source += 1
    assert (content(after) == case.expected() + 1).all()


@BY_ENDS
def test_a_thread_that_never_used_the_gpu_may_copy(ends):
    case, stream = Relayout(ends), torch.cuda.Stream()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as fresh:
        fresh.submit(case.copy, stream.cuda_stream).result()
    stream.synchronize()
    assert case.is_copied()


@BY_ENDS
def test_many_calls_are_in_flight_at_once(ends):
    """More of their tables than are kept idle, in two sizes."""
    cases = [Relayout(ends, FEW if seed % 3 else (20_000, 1, 1, 16), seed) for seed in range(300)]
    streams = [busy_stream()[0] for _ in range(2)]
    for index, case in enumerate(cases):
        case.copy(streams[index % 2].cuda_stream)
    for stream in streams:
        stream.synchronize()
    assert [index for index, case in enumerate(cases) if not case.is_copied()] == []


def test_pinned_memory_alone_is_the_hosts():
    case = Relayout((PINNED, PINNED), SHAPE)
    stream, _ = busy_stream()
    case.copy(stream.cuda_stream)
    assert case.is_copied()  # nothing was waited for
    assert not stream.query()
