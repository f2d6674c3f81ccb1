"""The `kvferry` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from kvferry import __version__

DEFAULT_MODEL = Path(__file__).with_name("llama-3.1-8b.json")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    arguments = parser().parse_args(argv)
    try:
        # Imported by name, since each needs what the other does without.
        command = import_module(f"kvferry.cli.{arguments.command}")
    except ModuleNotFoundError as error:
        if error.name != "rich":
            raise
        print("the demo needs rich: pip install 'kvferry[demo]'", file=sys.stderr)
        return 2
    try:
        return int(command.run(arguments))
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        print(f"kvferry {arguments.command}: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = argparse.ArgumentParser(prog="kvferry", description=__doc__)
    top.add_argument("--version", action="version", version=f"kvferry {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="move a request's cache between two engines that disagree",
        description="Fill a source engine's caches, move one request to a target engine that is "
        "sharded, paged and laid out differently, and verify every byte.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = demo.add_argument
    add("--model", type=Path, default=DEFAULT_MODEL, metavar="CONFIG", help="a config.json")
    add("--dtype", help="element type of the cache, where it is not the weights'")
    add("--tokens", type=positive, default=4096, help="tokens of the request")
    add("--max-gib", type=float, default=2.0, help="caches of both engines together, at most")
    add("--threads", type=positive, default=1, help="threads that copy, at most; memcpy has one")
    add("--seed", type=positive, default=1, help="of the block tables")
    for side, tp, tokens, layout in (("source", 4, 16, "KBHND"), ("target", 2, 64, "KBNHD")):
        add(f"--{side}-tp", type=positive, default=tp, help="tensor-parallel size")
        add(f"--{side}-block", type=positive, default=tokens, help="tokens a block")
        add(f"--{side}-layout", default=layout, help="axis letters in memory order")
    calibrate = commands.add_parser(
        "calibrate",
        help="measure the bus to a GPU, and print from which size of fragments on its copy "
        "engine is faster",
        description="Copy fragments between pinned memory and a GPU by a kernel and by the copy "
        "engine, and print which variables make kvferry take the faster way.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    calibrate.add_argument("--device", type=int, default=0, help="as frameworks count them")
    return top


def positive(text: str) -> int:
    """Parse an integer from 1 on; the parser names the option of any other."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number
