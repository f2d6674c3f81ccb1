"""Hypothesis profiles (examples are bounded by their number, never by a clock), shared modules."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, Phase, settings

# Pytest's importlib mode leaves `sys.path` alone, and the property tests share modules.
sys.path.insert(0, str(Path(__file__).parent / "property"))

# A pair of engines is drawn with a hundred choices, and sizes vary by two orders of magnitude.
SLOW_BY_NATURE = [HealthCheck.too_slow, HealthCheck.data_too_large]

settings.register_profile(
    "default",
    deadline=None,
    derandomize=False,
    print_blob=True,
    suppress_health_check=SLOW_BY_NATURE,
)
# Whether something fails is all that counts then, not its smallest case.
settings.register_profile(
    "unshrunk", settings.get_profile("default"), phases=[Phase.explicit, Phase.generate]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
