"""Deletion of sessions by the coordinator, each only at the revision that was evaluated. Pure.

A session is fenced when another has replaced it, when a probe proved it gone (see
`failure_detector`), or when its workers did not stop in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elasticjob_rendezvous.protocol.coordinator.round_writes import (
    DELETES_PER_TXN,
    RoundUpdate,
    Snapshot,
    held,
    write_round,
)
from elasticjob_rendezvous.protocol.kv import Compare, Delete, Range, Target, Txn
from elasticjob_rendezvous.protocol.records.members import Member, agent_of
from elasticjob_rendezvous.protocol.replica import Versioned, View


@dataclass(frozen=True, slots=True)
class _Fence:
    """Sessions to delete, with the conditions of the deletion."""

    ids: tuple[str, ...]
    names: str
    compares: tuple[Compare, ...]
    deletes: tuple[Delete, ...]


def duplicates(view: View, own: Versioned[Member]) -> list[Versioned[Member]]:
    """Return the sessions that a later session of the same member or pod name replaced.

    Of this member's own sessions the present one counts: a later key comes from a request that was
    assumed lost and was applied after all.
    """
    newest = {own.record.name: own}
    old: list[Versioned[Member]] = []
    for sessions in view.sessions.values():
        for session in sessions.values():
            if session.key == own.key:
                continue
            newer = newest.get(session.record.name)
            ours = newer is not None and newer.key == own.key and _same_agent(newer, session)
            if newer is None or (newer.created < session.created and not ours):
                newest[session.record.name] = session
                old += [newer] if newer else []
            else:
                old.append(session)
    return old


def _same_agent(one: Versioned[Member], other: Versioned[Member]) -> bool:
    """Return True if one and the same process began both sessions."""
    agent = agent_of(one.record.session)
    return bool(agent) and agent == agent_of(other.record.session)


def fence_late(snapshot: Snapshot, late: Sequence[Versioned[Member]]) -> RoundUpdate:
    """Delete sessions whose workers may still run, and note their members in the round.

    The note keeps a later coordinator from assuming that their leases have ended.
    """
    fence = _fence(late)
    ids = sorted({*snapshot.current.fenced, *fence.ids})
    noted = replace(snapshot.current, fenced=tuple(ids))
    note = f"fenced {fence.names}: its workers did not stop in time"
    return write_round(snapshot, noted, note, fence.deletes, fence.compares)


def fence_over(
    view: View, own: Versioned[Member], over: Sequence[Versioned[Member]]
) -> RoundUpdate:
    """Delete sessions that are over."""
    fence = _fence(over)
    return RoundUpdate(
        Txn(
            (held(own), *fence.compares),
            fence.deletes,
            (
                *(Range(compare.key) for compare in fence.compares),
                Range(view.keys.sessions(own.record.id), prefix=True),
            ),
        ),
        f"fenced {fence.names}: its session is over",
    )


def _fence(judged: Sequence[Versioned[Member]]) -> _Fence:
    """Return the deletions of as many sessions as one write may hold."""
    some = judged[:DELETES_PER_TXN]
    return _Fence(
        tuple(member.record.id for member in some),
        ", ".join(member.record.name for member in some),
        tuple(Compare(member.key, Target.MOD, member.modified) for member in some),
        tuple(Delete(member.key) for member in some),
    )
