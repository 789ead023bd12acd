"""Leave notices on links, a substitute for a key while etcd is unreachable. No I/O.

The view keeps the notices; one counts only while the leaver has no key, which says more.
"""

from __future__ import annotations

from elasticjob_rendezvous.core.effects import Effect, Tell
from elasticjob_rendezvous.core.events import LeavesTold
from elasticjob_rendezvous.core.membership import Membership
from elasticjob_rendezvous.core.records import Farewell, agent_of


def hear(our: Membership, event: LeavesTold) -> list[Effect]:
    """Note the leave notices, and forward them.

    No judgement is repeated: a notice has no effect while the leaver's key is there.
    """
    our.view.told_leaving(event.leaving)
    our.effects = []
    tell(our)
    return our.effects


def tell(our: Membership) -> None:
    """Announce this member's leave on its links; as a coordinator, forward the notices of others.

    The next coordinator may have no other source. This member's own notice comes first, so that
    there is room for it.
    """
    told: list[Farewell] = []
    if our.leaving:
        told = [Farewell(our.config.identity.id, our.config.session_nonce, our.leaving)]
    if our.coordinator.active or our.served >= 0:
        told += our.view.farewells.values()
    if tuple(told) != our.told:
        our.told = tuple(told)
        our.effects.append(Tell(our.told))


def forget(our: Membership) -> None:
    """Drop old notices: only agents seated in the newest final round may still be leaving."""
    roster = our.rounds.roster
    seated = {seat.id: agent_of(seat.session) for seat in roster.seats} if roster else {}
    kept = {id: said for id, said in our.view.farewells.items() if seated.get(id) == said.agent}
    our.view.farewells = kept
