"""The device copier without a device: kernels on host memory, calls on an emulated driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvferry import _core, copy, cuda

TESTS = Path(__file__).parents[1]
# Those of the properties whose copies a device can run.
PROPERTIES = [
    TESTS / "property" / name
    for name in ("test_block_copies.py", "test_push.py", "test_route.py", "test_staging.py")
]
CALLS = Path(__file__).parent / "helpers" / "emulated_calls.py"
EDGES = CALLS.with_name("emulated_edges.py")
VARIABLE = "KVFERRY_EMULATED_DEVICE"
# How threads take turns between barriers, and whether blocks of few of them go around often.
ORDERS = ("forward", "backward", "forward-small", "backward-small")


pytestmark = pytest.mark.skipif(
    _core._emulated_driver is None, reason="built without the feature `emulated`, see the Makefile"
)


_REASON = cuda.unavailable_reason() or ""
needs_kernels = pytest.mark.skipif("no CUDA kernels" in _REASON, reason=_REASON)


def run_tests(*files, **environment):
    arguments = ["-q", "-p", "no:cacheprovider", *map(str, files)]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        env={**os.environ, "HYPOTHESIS_PROFILE": "unshrunk", **environment},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert " passed" in result.stdout and "skipped" not in result.stdout


def test_another_order_than_those_is_refused(monkeypatch):
    """The variable is read, or no order would make a difference."""
    monkeypatch.setenv(VARIABLE, "sideways")
    rows = {"a": np.zeros((2, 2))}
    with pytest.raises(ValueError, match=f"{VARIABLE}.*sideways.*{ORDERS[-1]}"):
        copy.copy_kv_blocks(rows, rows, [0], [1], "h2d")


@pytest.mark.parametrize("order", ORDERS)
def test_properties_of_host_copies_hold_for_the_kernels(order):
    run_tests(*PROPERTIES, **{VARIABLE: order, "KVFERRY_EXAMPLES": "120"})


@needs_kernels
def test_edges_hold():
    run_tests(EDGES)


@needs_kernels
def test_calls_are_enqueued_checked_and_right():
    run_tests(CALLS, KVFERRY_EXAMPLES="600")


def answer(code):
    """Run statements behind an emulated driver that is not started yet; what they print."""
    before = (
        "import ctypes; from kvferry import _core, cuda\n"
        "driver = ctypes.CDLL(_core._emulated_driver, mode=ctypes.RTLD_GLOBAL)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", before + code],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@needs_kernels
@pytest.mark.parametrize(
    ("version", "capability", "reason"),
    [
        (13000, 8, "None"),
        (12090, 9, "the CUDA driver is for CUDA 12.9, older than 13.0"),
        (13010, 7, "no device here has compute capability 8.0 or later"),
    ],
)
def test_drivers_and_devices_may_be_too_old(version, capability, reason):
    pretend = f"driver.kvferry_emulated_pretend({version}, {capability})\n"
    assert answer(pretend + "print(cuda.unavailable_reason())") == reason


@needs_kernels
def test_children_that_were_forked_from_a_started_driver_are_told():
    code = """
import os
print(cuda.available(), flush=True)
if os.fork() == 0:
    print(cuda.available(), cuda.unavailable_reason(), flush=True)
    os._exit(0)
os.wait()
print(cuda.available())
"""
    parent, child, after = answer(code).splitlines()
    assert (parent, after) == ("True", "True")
    assert child.startswith("False this process was forked after the CUDA driver was started")


@needs_kernels
def test_children_that_were_forked_before_start_it_themselves():
    code = """
import os
if os.fork() == 0:
    print(cuda.available(), flush=True)
    os._exit(0)
os.wait()
print(cuda.available())
"""
    assert answer(code).splitlines() == ["True", "True"]
