"""The walk over a message's bytes that comes before anything is built from them."""

from __future__ import annotations

from kvferry.wire.limits import MAX_DEPTH, MAX_TEXT_BYTES, MAX_VALUES, VERSION, malformed, shown

_MAGIC = b"\xa7kvferry"  # a msgpack string of seven bytes


def check_start(data: bytes) -> None:
    """Refuse other people's bytes and other major versions, whatever follows in these."""
    start = 1 + len(_MAGIC)
    # An array of five to fifteen values, of which the second and third are numbers below 128.
    is_ours = len(data) >= start + 2 and 0x95 <= data[0] <= 0x9F and data[1:start] == _MAGIC
    if not is_ours or max(data[start : start + 2]) >= 0x80:
        raise ValueError(
            f"not a kvferry message: expected one that begins with the array of "
            f"'kvferry' and two version numbers, got {len(data)} bytes {data[: start + 2]!r}"
        )
    major, minor = data[start], data[start + 1]
    if major != VERSION[0]:
        raise ValueError(
            f"the message is of wire version {major}.{minor}, this kvferry reads "
            f"{VERSION[0]}.x and writes {VERSION[0]}.{VERSION[1]}"
        )


# What a msgpack value's first byte says: its kind, how many bytes hold its size, and its size where
# these are none. Sizes count bytes, values or pairs. Extension types have no place in the forms.
_Head = tuple[str, int, int]
_HEADS: dict[int, _Head] = {
    **dict.fromkeys([*range(0x80), *range(0xE0, 0x100), 0xC0, 0xC2, 0xC3], ("number", 0, 0)),
    **{0x80 + size: ("map", 0, size) for size in range(16)},
    **{0x90 + size: ("array", 0, size) for size in range(16)},
    **{0xA0 + size: ("string", 0, size) for size in range(32)},
    **{0xC4 + power: ("binary", 1 << power, 0) for power in range(3)},
    **{0xCA + power: ("number", 0, 4 << power) for power in range(2)},
    **{first + power: ("number", 0, 1 << power) for first in (0xCC, 0xD0) for power in range(4)},
    **{0xD9 + power: ("string", 1 << power, 0) for power in range(3)},
    **{0xDC + power: ("array", 2 << power, 0) for power in range(2)},
    **{0xDE + power: ("map", 2 << power, 0) for power in range(2)},
}


def walk(data: bytes) -> None:
    """Check the structure of one msgpack value that fills `data`, building nothing from it.

    msgspec on its own takes what this refuses: a key given twice (the last one wins, elsewhere
    perhaps the first), nesting up to the interpreter's limit, and a hundred bytes of objects for
    each byte of a message.
    """
    end = len(data)
    at = 0
    values = 1
    left = 1  # values still to come in the innermost container; in a map, keys count too
    keys: set[bytes] | None = None  # those seen, where that is a map
    outer: list[tuple[int, set[bytes] | None]] = []
    while left or outer:
        if not left:
            left, keys = outer.pop()
            continue
        kind, size, begin = _head(data, at)
        if kind == "map" or kind == "array":
            count = 2 * size if kind == "map" else size
            if count > end - begin:  # each takes a byte at least
                raise malformed(f"{kind} of {size} at byte {at} exceeds the {end} bytes there are")
            values += count
            if values > MAX_VALUES:
                raise malformed(f"it holds more than {MAX_VALUES} values")
        elif kind == "string" and size > MAX_TEXT_BYTES:
            raise malformed(f"string of {size} bytes at byte {at} is longer than {MAX_TEXT_BYTES}")
        elif size > end - begin:
            raise malformed(f"{kind} of {size} bytes at byte {at} exceeds the {end} there are")
        if keys is not None and left % 2 == 0:
            key = data[begin : begin + size]
            if kind != "string" or key in keys:
                what = f"given twice: {shown(repr(key))}" if kind == "string" else "no string"
                raise malformed(f"the map key at byte {at} is {what}")
            keys.add(key)
        left -= 1
        if kind == "map" or kind == "array":
            outer.append((left, keys))
            if len(outer) > MAX_DEPTH:
                raise malformed(f"it is nested more than {MAX_DEPTH} levels deep")
            left, keys = count, set() if kind == "map" else None
            at = begin
        else:
            at = begin + size
    if at != end:
        raise malformed(f"{end - at} bytes follow its end at byte {at}")


def _head(data: bytes, at: int) -> _Head:
    """Return the kind of the value at a byte, its size, and where what it counts begins."""
    if at >= len(data):
        raise malformed(f"it ends at byte {at}, inside an array or map")
    head = _HEADS.get(data[at])
    if head is None:
        raise malformed(f"byte {at} is 0x{data[at]:02x}, which begins no value that is used here")
    kind, length_bytes, size = head
    begin = at + 1 + length_bytes
    if begin > len(data):
        raise malformed(f"it ends at byte {len(data)}, inside the size of a {kind}")
    if length_bytes:
        size = int.from_bytes(data[at + 1 : begin], "big")
    return kind, size, begin
