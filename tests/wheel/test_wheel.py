"""The wheel as users build it: its name, its content, and that it is what this run tests.

`make test-wheel` builds it, installs it into an environment of its own, and runs all tests there.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest

import kvferry
from kvferry import _core, cuda

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "python"
INSTALLED = Path(sysconfig.get_path("platlib"))
CORE = "kvferry/_core.abi3.so"
# What the package has besides its extension: code, stubs, their marker, and the demo's model.
SUFFIXES = {".py", ".pyi", ".typed", ".json"}
# The README says 1 MB. Of Rust, Python and kernels, none has reason to grow by half.
MAX_WHEEL_BYTES = 1_500_000
# Elsewhere the build has no requirement that brings a compiler for kernels.
HAS_KERNELS = (sys.platform, platform.machine()) == ("linux", "x86_64")


@pytest.fixture(scope="module")
def wheel():
    (path,) = (ROOT / "target/wheel").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def files(wheel):
    """Return the content of every file of the wheel."""
    with ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_one_wheel_serves_every_python(wheel):
    distribution, version, python, abi, system = wheel.stem.split("-")
    assert (distribution, version) == ("kvferry", kvferry.__version__)
    assert (python, abi) == ("cp310", "abi3")
    if sys.platform == "linux":
        assert system == f"linux_{platform.machine()}"


def test_the_package_is_all_that_is_in_it(files):
    notes = f"kvferry-{kvferry.__version__}.dist-info/"
    package = {path.relative_to(PYTHON).as_posix() for path in PYTHON.rglob("*.*")}
    package = {name for name in package if Path(name).suffix in SUFFIXES}
    assert {"kvferry/py.typed", "kvferry/_core.pyi"} < package
    assert {name for name in files if not name.startswith(notes)} == {CORE, *package}
    assert files[f"{notes}licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert all(files[name] == (PYTHON / name).read_bytes() for name in package)


def test_size_is_bounded(wheel):
    assert wheel.stat().st_size <= MAX_WHEEL_BYTES


def test_the_extension_needs_nothing_of_this_checkout(files):
    assert _core._emulated_driver is None
    for folder in ("target", "rust", "cuda", ".venv"):
        assert bytes(ROOT / folder) not in files[CORE], folder


def test_what_it_needs_is_numpy_and_msgspec():
    needs = [need for need in metadata.requires("kvferry") if "extra ==" not in need]
    assert needs == ["msgspec>=0.18.6", "numpy>=1.26"]
    assert metadata.metadata("kvferry")["Requires-Python"] == ">=3.10"


def test_what_is_tested_is_what_is_in_it(files):
    """What is loaded lies where the wheel was installed, byte for byte as it is in the wheel."""
    loaded = {name: module for name, module in sys.modules.items() if name.startswith("kvferry.")}
    assert {"kvferry._core", "kvferry.cuda"} <= set(loaded)
    for module in (kvferry, *loaded.values()):
        # Submodules of the extension have no file.
        if path := getattr(module, "__file__", None):
            name = Path(path).relative_to(INSTALLED).as_posix()
            assert Path(path).read_bytes() == files[name]


@pytest.mark.skipif(not HAS_KERNELS, reason="only a build on Linux for x86-64 gets a CUDA compiler")
def test_it_has_kernels():
    reason = cuda.unavailable_reason()
    assert reason is None or "CUDA driver" in reason


def test_the_command_is_installed():
    command = Path(sysconfig.get_path("scripts")) / "kvferry"
    ran = subprocess.run([command, "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"kvferry {kvferry.__version__}\n"
