"""One count of charged failures for the whole job, agreed on in the store of every round.

Whoever was in a round before writes what it knows, and whoever's worker failed adds to a
counter, before it gives its role; all have done so once ranks are assigned. Agents that
are not ours take no part, and where nobody waits for ranks each agent counts for itself.
"""

from __future__ import annotations

from typing import Any

KNOWN = "elasticjob/restarts"
CHARGED = "elasticjob/charged"


class Budget:
    """`total` failures were charged so far; `charge`: our last round ended by one more."""

    def __init__(self, total: int = 0, charge: bool = False) -> None:
        self.total = total
        self._charge = charge

    def announce(self, store: Any) -> None:
        """Before ranks are assigned."""
        if self.total:
            store.set(KNOWN, str(self.total).encode())
        if self._charge:
            store.add(CHARGED, 1)

    def agree(self, store: Any) -> None:
        """After it: the same total for all."""
        if store.check([KNOWN]):
            self.total = max(self.total, int(store.get(KNOWN)))
        if store.check([CHARGED]):
            self.total += 1
        self._charge = False

    def alone(self) -> None:
        """Without the others."""
        self.total += self._charge
        self._charge = False
