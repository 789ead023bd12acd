"""Complete catalogue of planted bugs."""

from __future__ import annotations

from tests.sim.planted_bugs import rules, swaps, writes
from tests.sim.planted_bugs.planting import BUGS, Bug

MODULES = (rules, swaps, writes)
"""Modules that register their bugs when they are imported."""

__all__ = ["BUGS", "MODULES", "Bug"]
