"""Quorum of a joinable round: present, waiting and unstopped members, and the freeze rule. Pure."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass

from elasticjob_rendezvous.protocol.records.members import Member, MemberState
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster, by_name, legal_size
from elasticjob_rendezvous.protocol.replica import Versioned

Members = Mapping[str, Versioned[Member]]


@dataclass(frozen=True, slots=True)
class Quorum:
    """Members of a joinable round, grouped by availability.

    Args:
        waiting: members with which the round could be frozen now, in no particular order.
        unstopped: members that may still run workers of an older round.
        survivors: ids of the members of the last roster that are registered and do not leave.
        live: ids of all members that are registered and do not leave.
        held: number of waiting members that are held back after repeated losses.
        last: ids of the members that are chosen after all others.
    """

    waiting: tuple[Member, ...]
    unstopped: tuple[Member, ...]
    survivors: frozenset[str]
    live: frozenset[str]
    held: int = 0
    last: frozenset[str] = frozenset()


def group_members(
    members: Members,
    previous: int,
    roster: Roster | None,
    bounds: RendezvousParams,
    silenced: Container[str],
    held: frozenset[str] = frozenset(),
) -> Quorum:
    """Return the members grouped by availability.

    Args:
        members: valid session of each member.
        previous: number of the last final round; 0 before the first.
        roster: roster of that round.
        bounds: rendezvous parameters.
        silenced: ids of members that recently failed to confirm; they do not count as waiting.
        held: ids of members that are held back; they count as neither waiting nor survivors.
    """
    seated = {assignment.id for assignment in roster.seats} if roster else set()
    marked = {drain_request.member for drain_request in bounds.marks}
    waiting, unstopped, live = [], [], set()
    held_waiting = 0
    for id, versioned in members.items():
        member = versioned.record
        goes = member.state is MemberState.LEAVING or id in marked
        if not goes:
            live.add(id)
        if member.state is MemberState.WAITING and (member.round >= previous or id not in seated):
            if not goes and id not in silenced and bounds.agrees(member):
                if id in held:
                    held_waiting += 1
                else:
                    waiting.append(member)
        elif member.state is not MemberState.DONE and not member.stopped:
            unstopped.append(member)
    return Quorum(
        tuple(waiting),
        tuple(unstopped),
        frozenset(seated & live - held),
        frozenset(live),
        held_waiting,
    )


@dataclass(frozen=True, slots=True)
class Freeze:
    """Decision to ask these members to confirm."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Decision to ask no member yet; `reason` is a text for users."""

    reason: str
    last_call: bool = False


def choose(
    quorum: Quorum, bounds: RendezvousParams, previous: int, last_call_over: bool
) -> Freeze | Wait:
    """Return the members to freeze the round with, or the reason to wait.

    Survivors of the last roster come first, then the rest, then members lost again, each in rank
    order. After the first round the last call ends once all survivors wait, if they are enough:
    idle workers cost more than a later join. Nobody waits for members that are held back.
    """
    target = legal_size(bounds, len(quorum.waiting))
    if target < bounds.min_nodes or target == 0:
        return Wait(f"{len(quorum.waiting)} of at least {bounds.min_nodes} members are waiting")
    waiting = {member.id for member in quorum.waiting}
    recovering = previous > 0 and len(waiting & quorum.survivors) >= bounds.min_nodes
    wanted = bounds.wanted - quorum.held
    complete = len(waiting) >= wanted or (recovering and quorum.survivors <= waiting)
    if not complete and not last_call_over:
        return Wait(f"{len(waiting)} of {wanted} wanted members are waiting", True)
    ids = [member.id for member in by_name(quorum.waiting)]
    if len(ids) > target:
        ids.sort(key=lambda id: (id in quorum.last, id not in quorum.survivors))
    return Freeze(tuple(ids[:target]))
