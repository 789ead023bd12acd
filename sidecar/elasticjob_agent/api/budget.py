"""Job-wide count of charged failures, agreed on through the store of every round.

Before it publishes its role, an agent that took part in an earlier round writes its count, and an
agent whose worker failed increments a counter. Both are complete once ranks are assigned. torch's
agents do not take part; without rank assignment through the store each agent counts alone.
"""

from __future__ import annotations

from typing import Any

KNOWN = "elasticjob/restarts"
CHARGED = "elasticjob/charged"


class Budget:
    """Restart budget: `total` failures charged so far, one more pending if `charge` is set."""

    def __init__(self, total: int = 0, charge: bool = False) -> None:
        self.total = total
        self._charge = charge

    def announce(self, store: Any) -> None:
        """Write this agent's count to the store; call before ranks are assigned."""
        if self.total:
            store.set(KNOWN, str(self.total).encode())
        if self._charge:
            store.add(CHARGED, 1)

    def agree(self, store: Any) -> None:
        """Read the total, equal on all agents; call after ranks are assigned."""
        if store.check([KNOWN]):
            self.total = max(self.total, int(store.get(KNOWN)))
        if store.check([CHARGED]):
            self.total += 1
        self._charge = False

    def alone(self) -> None:
        """Count without the other agents."""
        self.total += self._charge
        self._charge = False
