"""Instructions of three fixed workloads beside the recorded counts: a regression without a clock.

`valgrind --tool=callgrind` counts what runs inside one call each: planning a request of 32,768
tokens, expanding it into fragments, and a re-layout of 1 MiB by the `avx2` kernel. Counts differ a
little between compilers and C libraries, so that those recorded elsewhere may need `--record`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from kvferry.copy import kernels

BENCHES = Path(__file__).parent
RECORD = BENCHES / "instructions.json"
WORKLOADS = ("plan", "descriptors", "copy")
KERNEL = "avx2"  # valgrind knows no wider vectors
# Runs differ by millionths, unrelated changes of the code around by a hundredth: inlining moves.
TOLERANCE = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="rewrite the recorded counts")
    options = parser.parse_args()
    if reason := why_not():
        print(f"instructions: skipped, {reason}")
        return
    build = ["cargo", "build", "--release", "--quiet", "-p", "kvferry-benches", "--example"]
    subprocess.run([*build, "instructions"], check=True, cwd=BENCHES)
    counts = {workload: count(workload) for workload in WORKLOADS}
    if options.record:
        RECORD.write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    worse = False
    for workload, counted in counts.items():
        change = counted / recorded[workload] - 1
        worse |= change > TOLERANCE
        print(
            f"{workload:12} {counted:>12,} instructions, recorded {recorded[workload]:>12,}", end=""
        )
        print(f", {change:+.2%}" + verdict(change))
    sys.exit(worse)


def why_not() -> str | None:
    if shutil.which("valgrind") is None:
        return "there is no valgrind"
    if KERNEL not in kernels():
        return f"this machine has no {KERNEL} kernel"
    return None


def count(workload: str) -> int:
    """Return the instructions inside the workload's `measured_…` function."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", BENCHES.parent / "target"))
    command = [
        "valgrind",
        "--tool=callgrind",
        "--callgrind-out-file=/dev/null",
        "--collect-atstart=no",
        f"--toggle-collect=instructions::measured_{workload}",
        str(target / "release/examples/instructions"),
        workload,
    ]
    environment = {**os.environ, "KVFERRY_KERNEL": KERNEL}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = re.search(r"Collected : (\d+)", run.stderr)
    if run.returncode != 0 or found is None or found[1] == "0":
        sys.exit(f"nothing was counted of {workload}:\n{run.stderr}")
    return int(found[1])


def verdict(change: float) -> str:
    if abs(change) <= TOLERANCE:
        return ""
    return " (more than recorded)" if change > 0 else " (fewer: worth a --record)"


if __name__ == "__main__":
    main()
