"""What arguments may be, where attributes are narrower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

# Lists, tuples, ranges, arrays: what becomes a tuple or an array of its own.
Integers: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]]
