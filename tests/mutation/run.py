"""Break the planner in known ways, and show that a property notices each.

Every mutant is a small patch of the Rust core (`mutants/*.patch`), applied to a copy of the
repository, built there and run through the property tests. A mutant that survives is a gap in the
tests: exit code 1.

    python tests/mutation/run.py [NAME ...]
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
MUTANTS = Path(__file__).with_name("mutants")
# Enough for every mutant to be met many times; the whole run takes some minutes.
EXAMPLES = "300"


def main(names: list[str]) -> int:
    """Run the named mutants, or all; return 1 if one survived."""
    patches = [
        patch for patch in sorted(MUTANTS.glob("*.patch")) if not names or patch.stem in names
    ]
    caught = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "kvferry"
        tracked = run(["git", "ls-files", "-z"], ROOT).stdout.split("\0")
        for name in filter(None, tracked):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        for patch in patches:
            begin = time.monotonic()
            noticed = notice(patch, copy)
            caught += bool(noticed)
            verdict = f"caught by {noticed}" if noticed else "SURVIVED"
            print(f"{patch.stem}: {verdict} ({time.monotonic() - begin:.0f} s)", flush=True)
    print(f"{caught} of {len(patches)} mutants caught")
    return int(caught < len(patches))


def notice(patch: Path, copy: Path) -> str:
    """Build a mutant; return the property that fails on it, or nothing."""
    must(run(["git", "apply", str(patch)], copy))
    try:
        build(copy)
        return failing_property(copy)
    finally:
        must(run(["git", "apply", "--reverse", str(patch)], copy))


def build(copy: Path) -> None:
    """Build the extension into the copy, with a build cache that all mutants share."""
    cache = ROOT / "target/mutants"
    environment = {"CARGO_TARGET_DIR": str(cache), "PYO3_PYTHON": sys.executable}
    must(run(["cargo", "build", "--release", "-p", "kvferry-py"], copy, environment))
    shutil.copy2(cache / "release/lib_core.so", copy / "python/kvferry/_core.abi3.so")


def failing_property(copy: Path) -> str:
    """Run the property tests; return the name of the first that fails."""
    environment = {
        "PYTHONPATH": str(copy / "python"),
        "KVFERRY_EXAMPLES": EXAMPLES,
        "HYPOTHESIS_PROFILE": "unshrunk",
    }
    # The widest property first: most mutants need no other.
    tests = ["tests/property/test_route.py", "tests/property"]
    ran = run(
        [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", *tests], copy, environment
    )
    failed = re.search(r"^FAILED \S+::(\w+)", ran.stdout, re.MULTILINE)
    if ran.returncode and not failed:
        must(ran)
    return failed[1] if failed else ""


def run(
    command: list[str], folder: Path, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder."""
    variables = {**os.environ, **(environment or {})}
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )


def must(ran: subprocess.CompletedProcess[str]) -> None:
    """Stop with what a command said if it failed."""
    if ran.returncode:
        raise SystemExit(f"{ran.args} failed:\n{ran.stdout}{ran.stderr}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
