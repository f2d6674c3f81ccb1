"""Copies on several threads, and what other threads may do meanwhile."""

from __future__ import annotations

import threading
import time
import weakref

import numpy as np
from engines import (
    attention_model,
    counting_tensors,
    make_engine,
    source_cache,
    target_cache,
    untouched_tensors,
)
from threads import assert_other_threads_run

from kvferry import KVCache, Route


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
