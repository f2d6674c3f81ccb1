"""Makes what the tests on a GPU share importable, and hand-made DLPack producers."""

from __future__ import annotations

import sys
from pathlib import Path

# Pytest's importlib mode leaves `sys.path` alone.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "unit" / "helpers"))
