"""Numbers as people read them."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Say how many there are."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def size(num_bytes: float) -> str:
    """Say bytes in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"
