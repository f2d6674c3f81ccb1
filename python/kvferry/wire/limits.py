"""The wire version, what a message may hold at most, and how errors repeat what a peer wrote."""

from __future__ import annotations

#: Major and minor version written. A reader takes every minor version of its major one.
VERSION = (1, 0)

#: Bytes of a message: room for a group's most ids at eight bytes each, and as much again.
MAX_MESSAGE_BYTES = 64 << 20
#: Block ids of one group: a request of four million tokens at one token a block.
MAX_IDS_PER_GROUP = 4 << 20
#: Values of a message, keys and containers included: an object takes some hundred bytes, so 25 MiB.
#: The largest honest message, a rank of `MAX_SLOTS` tensors of seven axes, stays below.
MAX_VALUES = 1 << 18
#: Arrays and maps inside one another; the deepest form, a state part's shape, has eight.
MAX_DEPTH = 16
#: UTF-8 bytes of a string: names and ids, which errors repeat.
MAX_TEXT_BYTES = 4096
#: Groups of a model: more than any model has layers.
MAX_GROUPS = 1024
#: Layers of a group: some thirty times those of the deepest models.
MAX_LAYERS = 4096
#: Parts of a recurrent state.
MAX_STATE_PARTS = 64
#: Axes of a state part or tensor; numpy's limit.
MAX_DIMENSIONS = 64
#: Tensors of one rank: a key and a value for each of `MAX_LAYERS`.
MAX_SLOTS = 2 * MAX_LAYERS
#: Ranks of a stage times groups and state parts. Engines and routes keep an interval of heads for
#: each, so 16 MiB.
MAX_SHARDS = 1 << 20

_MAX_SHOWN = 300


def malformed(why: str) -> ValueError:
    """Make the error of bytes that are no message."""
    return ValueError(f"malformed kvferry message: {why}")


def shown(text: str) -> str:
    """Shorten what a peer wrote: it may have the size of a message."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
