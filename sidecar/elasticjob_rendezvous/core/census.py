"""Who is here, who waits and whose workers still run: the freeze rule's arithmetic. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.records import Member, MemberState
from elasticjob_rendezvous.core.roster import Roster, by_name, legal_size
from elasticjob_rendezvous.core.view import Versioned

Members = Mapping[str, Versioned[Member]]


@dataclass(frozen=True, slots=True)
class Census:
    """The members of a joinable round, sorted by what they can do.

    Args:
        waiting: could be frozen now, in no particular order.
        unstopped: workers of an older round may still run here.
        survivors: of the last roster, present and not about to leave.
        live: present and not about to leave.
    """

    waiting: tuple[Member, ...]
    unstopped: tuple[Member, ...]
    survivors: frozenset[str]
    live: frozenset[str]


def take(
    members: Members,
    previous: int,
    roster: Roster | None,
    bounds: Bounds,
    silenced: Container[str],
) -> Census:
    """Sort the members. `silenced` ids failed to confirm lately and do not count."""
    seated = {seat.id for seat in roster.seats} if roster else set()
    marked = {mark.member for mark in bounds.marks}
    waiting, unstopped, live = [], [], set()
    for id, versioned in members.items():
        member = versioned.record
        goes = member.state is MemberState.LEAVING or id in marked
        if not goes:
            live.add(id)
        if member.state is MemberState.WAITING and (member.round >= previous or id not in seated):
            if not goes and id not in silenced and bounds.agrees(member):
                waiting.append(member)
        elif member.state is not MemberState.DONE and not member.stopped:
            unstopped.append(member)
    return Census(
        tuple(waiting),
        tuple(unstopped),
        frozenset(seated & live),
        frozenset(live),
    )


@dataclass(frozen=True, slots=True)
class Freeze:
    """Ask these members to confirm."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nobody is asked yet; `reason` is for people."""

    reason: str
    last_call: bool = False


def choose(census: Census, bounds: Bounds, previous: int, last_call_over: bool) -> Freeze | Wait:
    """Whether to freeze now, and whom.

    Survivors of the last roster come first, then the rest, each in rank order.
    After a first round nobody waits out the last call while all that live wait:
    training that stands still costs more than a later join.
    """
    target = legal_size(bounds, len(census.waiting))
    if target < bounds.min_nodes or target == 0:
        return Wait(f"{len(census.waiting)} of at least {bounds.min_nodes} members are waiting")
    waiting = {member.id for member in census.waiting}
    recovering = previous > 0 and len(waiting & census.survivors) >= bounds.min_nodes
    complete = len(waiting) >= bounds.wanted or (recovering and census.survivors <= waiting)
    if not complete and not last_call_over:
        return Wait(f"{len(waiting)} of {bounds.wanted} wanted members are waiting", True)
    ids = [member.id for member in by_name(census.waiting)]
    if len(ids) > target:
        ids.sort(key=lambda id: id not in census.survivors)
    return Freeze(tuple(ids[:target]))
