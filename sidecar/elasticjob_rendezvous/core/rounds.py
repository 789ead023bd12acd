"""Memory of the rounds that outlives a loss of etcd's data. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.core.records import Round, RoundState
from elasticjob_rendezvous.core.roster import Roster
from elasticjob_rendezvous.core.view import View


@dataclass(slots=True)
class Rounds:
    """Newest rounds seen.

    `known` is the highest number ever seen, `last` the newest round that was seen final.
    """

    known: int = 0
    last: tuple[Round, Roster] | None = None

    @property
    def roster(self) -> Roster | None:
        """Roster of the newest round that was seen final."""
        return self.last[1] if self.last else None

    def remember(self, view: View) -> bool:
        """Keep what is known now; return True if another round is final than before."""
        if view.round is None:
            return False
        current = view.round.record
        self.known = max(self.known, current.number)
        roster = view.rosters.get(current.number)
        if current.state is not RoundState.FINAL or roster is None:
            return False
        before = self.last[0].number if self.last else None
        self.last = (current, roster)
        return before != current.number
