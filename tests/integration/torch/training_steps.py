"""Steps and kills of `training_variants.py`, for tests that do not import torch themselves."""

from __future__ import annotations

STEPS = 12
KILLS = ((4, "before the step"), (8, "during the copy"))
