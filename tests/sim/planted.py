"""Complete catalogue of planted bugs."""

from __future__ import annotations

from tests.sim import planted_rules, planted_swaps, planted_writes
from tests.sim.planting import BUGS, Bug

__all__ = ["BUGS", "Bug", "planted_rules", "planted_swaps", "planted_writes"]
