"""Complete catalogue of planted bugs."""

from __future__ import annotations

from tests.sim import planted_rules, planted_swaps, planted_writes
from tests.sim.planting import BUGS, Bug

MODULES = (planted_rules, planted_swaps, planted_writes)
"""Modules that register their bugs when they are imported."""

__all__ = ["BUGS", "MODULES", "Bug"]
