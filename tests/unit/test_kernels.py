"""Copy kernels: each one that this machine has, and the variable that forces one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.copy import kernels

CHECK = Path(__file__).parent / "helpers" / "kernel_check.py"
KNOWN = ("portable", "avx2", "avx512", "avx2-stream", "avx512-stream")

# Every function that copies, each refused before it has written anything.
REFUSED = """
import os, sys
import numpy as np
from kvferry import AttentionGroup, EngineSpec, KVCache, ModelSpec, Route, copy

source, target = np.arange(96, dtype=np.uint8).reshape(4, 4, 3, 2), np.zeros((4, 4, 3, 2), np.uint8)
model = ModelSpec((AttentionGroup((0,), 3, 1, dtype="uint8"),))
engine = EngineSpec("engine", model, 4, "BNHC")
plan = Route(engine, engine).plan(0, [[1]], [[2]], tokens=(0, 4))
layouts = {"source_layout": "BNHC", "target_layout": "BNHC"}
calls = [
    lambda: plan.copy([KVCache(engine, 0, [source])], KVCache(engine, 0, [target])),
    lambda: copy.copy_blocks(source, target, [1], [2], **layouts),
    lambda: copy.copy_kv_blocks({"a": source}, {"a": target}, [1], [2], "h2d"),
    lambda: copy.kv_postprocess_blksize_on_receive(source, [1], 2),
    lambda: copy.kv_postprocess_layout_on_receive(source, [1]),
    lambda: copy.kv_postprocess_blksize_and_layout_on_receive(source, [1], 2),
]
for call in calls * 2:
    try:
        call()
    except ValueError as error:
        print(error)
    else:
        sys.exit("copied")
assert not target.any() and (source.ravel() == np.arange(96)).all()
"""


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_kernels_are_some_of_those_known_the_best_last():
    names = kernels()
    assert names[0] == "portable"
    assert list(names) == [name for name in KNOWN if name in names]


def test_every_kernel_copies_what_the_models_say():
    result = run(CHECK, *kernels())
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "name",
    ["nonsense", "AVX2", "avx2 ", "stream", *(name for name in KNOWN if name not in kernels())],
)
def test_a_kernel_that_is_not_here_is_refused_before_anything_is_written(name):
    result = run("-c", REFUSED, KVFERRY_KERNEL=name)
    assert result.returncode == 0, result.stderr
    message = f"KVFERRY_KERNEL={name} is not one of {', '.join(kernels())}"
    assert result.stdout.splitlines() == [message] * 12


def test_a_variable_set_to_nothing_names_no_kernel():
    result = run("-c", REFUSED, KVFERRY_KERNEL="")
    assert result.stderr == "copied\n"


def test_a_kernel_named_in_bytes_that_are_no_text_is_refused():
    program = "import os; os.environb[b'KVFERRY_KERNEL'] = b'av\\xff'" + REFUSED
    result = run("-c", program)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("is not one of portable") == 12


def test_the_variable_is_read_before_the_first_copy_and_never_again():
    program = """
import os
import numpy as np
from kvferry import copy
target = np.zeros((2, 2))
ends = {"a": np.ones((2, 2))}, {"a": target}
copy.copy_kv_blocks(*ends, [0], [0], "h2d")
os.environ["KVFERRY_KERNEL"] = "nonsense"
copy.copy_kv_blocks(*ends, [0], [1], "h2d")
assert target.all()
"""
    result = run("-c", program, KVFERRY_KERNEL="portable")
    assert result.returncode == 0, result.stderr
