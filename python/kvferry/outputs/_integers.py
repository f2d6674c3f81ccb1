"""Integers that callers hand over, refused by name where they are none."""

from __future__ import annotations

import operator
from typing import Any


def integer(name: str, value: Any) -> int:
    """Return a value that is an integer of any kind; a fraction is an error, not rounded."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} is no integer") from None
