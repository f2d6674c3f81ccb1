"""What `import kvferry` adds to `import numpy, msgspec`, and that it loads no framework.

Each import is timed in a fresh interpreter, the two kinds in turns. The limit is part of the public
contract; the time of one machine is no test, so only a framework makes this script fail.
"""

from __future__ import annotations

import json
import subprocess
import sys

from _measure import medians, print_heading, print_table

ROUNDS = 21
LIMIT_MS = 30
BASE = "import numpy, msgspec"
# What gives a framework, a driver or a transport away in the name of a module or library.
FRAMEWORKS = ("torch", "cuda", "cupy", "jax", "nvidia", "nixl", "mooncake")
PROBE = """
import json, sys, time
import numpy, msgspec
before = set(sys.modules)
begin = time.perf_counter()
import kvferry
seconds = time.perf_counter() - begin
libraries = {line.split()[-1].rsplit("/", 1)[-1] for line in open("/proc/self/maps")}
loaded = sorted(set(sys.modules) | libraries)
added = sorted(set(sys.modules) - before)
print(json.dumps({"seconds": seconds, "loaded": loaded, "added": added}))
"""


def main() -> None:
    seconds = medians(
        {
            "start": lambda: python("pass"),
            "base": lambda: python(BASE),
            "kvferry": lambda: python(f"{BASE}, kvferry"),
        },
        rounds=ROUNDS,
    )
    probes = [json.loads(python(PROBE)) for _ in range(ROUNDS)]
    inside = sorted(probe["seconds"] for probe in probes)[ROUNDS // 2]
    added = seconds["kvferry"] - seconds["base"]
    print_heading("Imports", f"Fresh interpreters, medians of {ROUNDS} interleaved rounds")
    print_table(
        ["", "ms", "limit"],
        [
            ["no import", f"{seconds['start'] * 1e3:.1f}", ""],
            [BASE, f"{seconds['base'] * 1e3:.1f}", ""],
            [f"{BASE}, kvferry", f"{seconds['kvferry'] * 1e3:.1f}", ""],
            ["  the difference", f"{added * 1e3:.1f}", f"{LIMIT_MS}"],
            ["  the statement alone", f"{inside * 1e3:.1f}", ""],
        ],
    )
    probe = probes[0]
    frameworks = [
        name
        for name in probe["loaded"]
        if any(framework in name.lower() for framework in FRAMEWORKS)
    ]
    own = [name for name in probe["added"] if name.split(".")[0] == "kvferry"]
    others = sorted(set(probe["added"]) - set(own))
    print("kvferry's modules:", ", ".join(own))
    print("others that it loads:", ", ".join(others) or "none")
    print("modules and libraries of torch, CUDA or a transport:", ", ".join(frameworks) or "none")
    if frameworks:
        sys.exit(1)


def python(code: str) -> str:
    """Run `code` in a fresh interpreter and return what it prints."""
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
