"""Copies in forked children and at the interpreter's end: none waits for threads that are gone."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A copy of 24 MiB is shared by three threads, and so makes the process's pool.
PRELUDE = """
import multiprocessing, os, signal, sys, threading, time
import numpy as np
from kvferry.copy import copy_kv_blocks, set_num_threads

set_num_threads(3)
SOURCE = np.random.default_rng(0).integers(0, 256, (24, 1 << 20), np.uint8)

def is_copied(rows=24, seconds=20):
    signal.alarm(seconds)  # what waits for ever ends here
    target = np.zeros_like(SOURCE)
    copy_kv_blocks({"a": SOURCE}, {"a": target}, range(rows), range(23, 23 - rows, -1), "h2d")
    signal.alarm(0)
    return (target[::-1][:rows] == SOURCE[:rows]).all() and not target[::-1][rows:].any()

def child(work=is_copied):
    pid = os.fork()
    if pid == 0:
        os._exit(0 if work() else 1)
    status = os.waitpid(pid, 0)[1]
    assert status == 0, f"a child ended with {status}"
    return True

def num_threads():
    names = (open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task"))
    return sum(name.startswith("kvferry") for name in names)
"""


def run(program):
    result = subprocess.run(
        # A newer Python warns of forks beside threads, which is what these are about.
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + program],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, f"{result.returncode}: {result.stdout}{result.stderr}"
    return result.stdout


def test_a_forked_child_copies_on_threads_of_its_own():
    run("""
assert is_copied()
child()
child(lambda: is_copied() and child(lambda: is_copied() and child()))
assert is_copied()
child(lambda: child(lambda: child()))
""")


def test_a_fork_from_a_thread_while_others_copy():
    # A first call sets up what PyO3 sets up once, under locks that a fork must not find taken.
    run("""
assert is_copied()
stop = []
def copy_on():
    while not stop:
        assert is_copied(seconds=0)
others = [threading.Thread(target=copy_on) for _ in range(2)]
children = []
def fork():
    for _ in range(4):
        children.append(child())
forking = [threading.Thread(target=fork) for _ in range(2)]
for thread in others + forking:
    thread.start()
for thread in forking:
    thread.join()
stop.append(True)
for thread in others:
    thread.join()
assert children == [True] * 8
assert is_copied()
""")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_multiprocessing(method, tmp_path):
    # What is spawned imports its work from a file.
    path = tmp_path / "workers.py"
    path.write_text(
        PRELUDE
        + f"""
def work(index):
    return bool(is_copied(index + 20))

if __name__ == "__main__":
    assert is_copied()
    with multiprocessing.get_context({method!r}).Pool(2) as pool:
        assert pool.map(work, range(4)) == [True] * 4
    assert is_copied()
"""
    )
    subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", path], timeout=100, check=True
    )


def test_many_threads_that_copy_first_at_once_share_one_pool():
    run("""
def first_copies():
    start = threading.Barrier(8)
    targets = [np.zeros_like(SOURCE[:9]) for _ in range(8)]
    def first(target):
        start.wait()
        copy_kv_blocks({"a": SOURCE}, {"a": target}, range(9), range(9), "h2d")
    threads = [threading.Thread(target=first, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The threads of pools that came too late end by themselves.
    end = time.monotonic() + 20
    while num_threads() > min(15, len(os.sched_getaffinity(0))):
        assert time.monotonic() < end, f"{num_threads()} threads remain"
        time.sleep(0.01)
    return num_threads() > 0 and all((target == SOURCE[:9]).all() for target in targets)

for _ in range(5):
    child(first_copies)
""")


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces of processes are Linux's")
def test_a_child_with_the_process_id_of_its_parent():
    """In a new namespace the first process is number one, whatever its parent is."""
    said = run("""
import ctypes
CLONE_NEWPID = 0x20000000

def unshare():
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWPID) != 0:
        print("new namespaces take a privilege")
        sys.exit(0)

def second():
    assert os.getpid() == 1
    # No alarm ends the first process of a namespace.
    threading.Thread(target=lambda: (time.sleep(20), os._exit(2)), daemon=True).start()
    return is_copied()
def first():
    assert os.getpid() == 1
    copied = is_copied()
    unshare()
    return copied and child(second)

unshare()
child(first)
""")
    if said:
        pytest.skip(said)


@pytest.mark.parametrize("daemon", [False, True])
def test_the_interpreter_ends_during_copies(daemon):
    """A thread that still copies is waited for, or left behind; either way the process ends."""
    run(f"""
copies = []
def copy_on():
    for _ in range({1000 if daemon else 20}):
        copies.append(is_copied(seconds=0))
for _ in range(3):
    threading.Thread(target=copy_on, daemon={daemon}).start()
while len(copies) < 3:
    time.sleep(0.001)
""")


def test_a_copy_at_exit():
    run("""
import atexit
atexit.register(lambda: os._exit(0 if is_copied() else 1))
sys.exit(3)
""")
