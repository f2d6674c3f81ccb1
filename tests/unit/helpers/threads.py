"""Whether other Python threads run while a call moves bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def assert_other_threads_run(call: Callable[[], object]) -> None:
    """Assert that another thread runs during five calls of some milliseconds, all the time."""
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        while not ticks:
            time.sleep(0.001)
        begin = time.perf_counter()
        for _ in range(5):
            call()
        end = time.perf_counter()
    finally:
        stop.set()
        thread.join()
    # Fiftieths of that time in which the other thread ran: only between the five calls, there were
    # far fewer.
    moments = {int((m - begin) / (end - begin) * 50) for m in ticks if begin < m < end}
    assert len(moments) > 12
