"""Makes what the tests on a GPU share importable."""

from __future__ import annotations

import sys
from pathlib import Path

# Pytest's importlib mode leaves `sys.path` alone.
sys.path.insert(0, str(Path(__file__).parent))
