"""Names the machine and the versions that figures are from."""

from __future__ import annotations

import datetime
import os
import platform
import re
from importlib.metadata import version
from pathlib import Path

CPU = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def main() -> None:
    print("# Benchmarks of kvferry\n")
    versions = ", ".join(f"{name} {version(name)}" for name in ("kvferry", "numpy", "torch"))
    print(f"{datetime.date.today()}: {processor()}; {os.cpu_count()} CPUs; {caches()}.")
    system = f"{platform.system()} {platform.release()}"
    print(f"{system}, Python {platform.python_version()}, {versions}.\n")


def processor() -> str:
    text = CPU.read_text(encoding="utf-8") if CPU.exists() else ""
    found = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.MULTILINE))
    if "model name" not in found:
        return platform.processor() or platform.machine()
    return "{model name} (family {cpu family}, model {model})".format(**found)


def caches() -> str:
    sizes = (
        path.read_text(encoding="utf-8").strip() for path in sorted(CACHES.glob("index*/size"))
    )
    return "caches of " + (", ".join(sizes) or "unknown size")


if __name__ == "__main__":
    main()
