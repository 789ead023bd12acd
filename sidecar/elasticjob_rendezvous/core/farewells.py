"""Leaves that are told on links: what stands in for a key while etcd cannot be reached. Pure.

What was told is kept in the view; it counts only once the leaver has no key that says more.
"""

from __future__ import annotations

from elasticjob_rendezvous.core.effects import Effect, Tell
from elasticjob_rendezvous.core.events import LeavesTold
from elasticjob_rendezvous.core.membership import Membership
from elasticjob_rendezvous.core.records import Farewell, agent_of


def hear(our: Membership, event: LeavesTold) -> list[Effect]:
    """Note who leaves, and pass it on.

    Nobody is judged anew: nothing follows from it while its key is there.
    """
    our.view.told_leaving(event.leaving)
    our.effects = []
    tell(our)
    return our.effects


def tell(our: Membership) -> None:
    """Say on our links that we leave; as a coordinator, of whom else that was heard.

    For whoever coordinates next may hear of it from nobody else. Our own word comes first, lest
    there be no room for it.
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
    """Another round is final: who is not of it, or has another agent in it, left long ago."""
    roster = our.rounds.roster
    seated = {seat.id: agent_of(seat.session) for seat in roster.seats} if roster else {}
    kept = {id: said for id, said in our.view.farewells.items() if seated.get(id) == said.agent}
    our.view.farewells = kept
