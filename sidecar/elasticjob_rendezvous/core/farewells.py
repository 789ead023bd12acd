"""Leaves that are told on links: what stands in for a key while etcd cannot be reached. Pure.

What was told is kept in the view; it counts only once the leaver has no key that says more.
"""

from __future__ import annotations

from elasticjob_rendezvous.core.effects import Effect, Tell
from elasticjob_rendezvous.core.events import LeavesTold
from elasticjob_rendezvous.core.membership import Membership


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

    For whoever coordinates next may hear of it from nobody else.
    """
    leaving: dict[str, str] = {}
    if our.coordinator.active or our.served >= 0:
        leaving = {id: farewell.reason for id, farewell in our.view.farewells.items()}
    if our.leaving:
        leaving[our.config.identity.id] = our.leaving
    told = tuple(leaving.items())
    if told != our.told:
        our.told = told
        our.effects.append(Tell(told))


def forget(our: Membership) -> None:
    """Another round is final: who is not of it may have left long ago."""
    roster = our.rounds.roster
    seated = {seat.id for seat in roster.seats} if roster else set()
    for id in our.view.farewells.keys() - seated:
        del our.view.farewells[id]
