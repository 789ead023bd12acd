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
        waiting: could be frozen now, in no particular order.
        unstopped: may still have running workers of an older round.
        survivors: of the last roster, present and not about to leave.
        live: present and not about to leave.
        held: number of waiting members that were lost again and do not count yet.
        last: members chosen only for the ranks that others leave.
    """

    waiting: tuple[Member, ...]
    unstopped: tuple[Member, ...]
    survivors: frozenset[str]
    live: frozenset[str]
    held: int = 0
    last: frozenset[str] = frozenset()


def take(
    members: Members,
    previous: int,
    roster: Roster | None,
    bounds: RendezvousParams,
    silenced: Container[str],
    held: frozenset[str] = frozenset(),
) -> Quorum:
    """Group the members.

    `silenced` ids failed to confirm recently, `held` ones were lost again: they do not count.
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
