"""Captures, threads and managed memory on an emulated driver, in a process of their own."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from elsewhere import Twins
from emulated import Place, driver, make_stream, wait
from producers import CUDA_MANAGED, Producer

from kvferry import copy
from kvferry.errors import LayoutError

GLOBAL, THREAD_LOCAL = 0, 1  # modes of a capture
SHAPE = (6, 40)  # rows of 2-byte items
LARGE = (40_000, 16)  # rows of bytes, whose table takes 640 KB


@pytest.fixture(autouse=True, scope="module")
def _driver():
    driver()


def numbers(seed=1):
    return np.random.default_rng(seed).integers(0, 1 << 16, SHAPE, np.uint16)


def copy_rows(from_, to, source_ids, target_ids, stream=None):
    tensors = {"a": from_.tensors[0]}, {"a": to.tensors[0]}
    copy.copy_kv_blocks(*tensors, source_ids, target_ids, "h2d", stream=stream)


def ends(content, place):
    """Return a source of this content, and a target of zeros with its twin here."""
    target = np.zeros_like(content)
    return Twins([content], place), Twins([target], place), target


@contextmanager
def capture(stream: int, mode: int) -> Iterator[ctypes.c_void_p]:
    """Record what is enqueued on a stream into a graph."""
    handle, graph = ctypes.c_void_p(stream), ctypes.c_void_p()
    assert driver().cuStreamBeginCapture_v2(handle, mode) == 0
    yield graph
    assert driver().cuStreamEndCapture(handle, ctypes.byref(graph)) == 0


def launch(graph: ctypes.c_void_p, stream: int) -> None:
    executable = ctypes.c_void_p()
    assert driver().cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, 0) == 0
    assert driver().cuGraphLaunch(executable, ctypes.c_void_p(stream)) == 0


def in_threads(*calls: Callable[[], object]) -> None:
    """Make calls at once, and raise what one of them has."""
    raised: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    for error in raised:
        raise error


def test_the_first_call_of_all_may_come_while_another_thread_captures():
    """It loads the kernels, which a capture forbids to all threads that do not ask for it.

    The first test: a device is opened once.
    """
    from_, to, target = ends(numbers(), Place(0))
    on, captured = make_stream(), make_stream()
    with capture(captured, GLOBAL):
        in_threads(lambda: copy_rows(from_, to, [1], [2], on))
    wait(on)
    to.fetch()
    assert np.array_equal(target[2], numbers()[1])


def test_graphs_take_calls_that_were_never_made_before():
    from_, to, target = ends(numbers(), Place(0))
    on = make_stream()
    with capture(on, THREAD_LOCAL) as graph:
        copy_rows(from_, to, [5, 0], [1, 4], on)
    wait(on)
    assert not to.differ()
    launch(graph, on)
    assert not to.differ()
    wait(on)
    to.fetch()
    assert np.array_equal(target[[1, 4]], numbers()[[5, 0]])


def test_graphs_take_more_tables_than_are_kept_idle():
    source, on = np.zeros(LARGE, np.uint8), make_stream()
    from_, to, _ = ends(source, Place(0))
    ids = [np.roll(np.arange(len(source))[::-1], turn) for turn in range(14)]
    for each in ids:
        copy_rows(from_, to, each, range(len(source)), on)
        wait(on)
    for each in ids:
        with capture(on, THREAD_LOCAL):
            copy_rows(from_, to, each, range(len(source)), on)


def test_managed_memory_has_a_default_stream():
    place = Place(0, dlpack_device=(CUDA_MANAGED, 0))
    from_, to, target = ends(numbers(), place)
    copy_rows(from_, to, [1], [2])
    wait(0)
    to.fetch()
    assert np.array_equal(target[2], numbers()[1])
    rows = numbers().reshape(2, 3, 5, 8)
    repaired = Twins([rows], place)
    copy.kv_postprocess_layout_on_receive(repaired.tensors[0], [1])
    wait(0)
    assert repaired.differ()


def test_memory_that_is_said_to_be_managed_is_asked_about():
    content = numbers()
    memory = (ctypes.c_uint8 * content.nbytes)()
    pageable = Producer(SHAPE, (SHAPE[1], 1), device=(CUDA_MANAGED, 0), memory=memory)
    _, to, _ = ends(content, Place(0))
    with pytest.raises(LayoutError, match="said to be managed memory"):
        copy.copy_kv_blocks({"a": pageable}, {"a": to.tensors[0]}, [1], [2], "h2d")


def test_threads_share_tables_devices_and_the_places_of_streams():
    """They repeat each other's calls, with tables that give way, on streams that come and go."""
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, (20_000, 16), np.uint8)
    orders = [rng.permutation(len(source)) for _ in range(10)]
    sources = [Twins([source], Place(device)) for device in (0, 1)]
    # Each order has a target of its own on each device, which calls write again and again.
    targets = {
        (device, order): ends(source, Place(device))[1:]
        for device in (0, 1)
        for order in range(len(orders))
    }

    written: set[tuple[int, int]] = set()

    def work(number: int) -> None:
        picks = random.Random(number)
        for _ in range(25):
            device, order = picks.randrange(2), picks.randrange(len(orders))
            to, _ = targets[device, order]
            on = make_stream(device)
            copy_rows(sources[device], to, range(len(source)), orders[order], on)
            wait(on, device)
            assert driver().cuStreamDestroy_v2(ctypes.c_void_p(on)) == 0
            written.add((device, order))

    in_threads(*(lambda number=number: work(number) for number in range(6)))
    assert len(written) == len(targets)
    for (_, order), (to, target) in targets.items():
        to.fetch()
        assert np.array_equal(target[orders[order]], source)
