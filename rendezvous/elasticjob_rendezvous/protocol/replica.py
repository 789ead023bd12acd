"""Replica of a job's keys in one agent, built from reads, watches and its own writes.

Each source may lag behind the others. The replica therefore stores the newest revision of each
key, deletions included, and ignores older updates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from elasticjob_rendezvous.protocol.kv import Delete as DeleteOp
from elasticjob_rendezvous.protocol.kv import (
    Deleted,
    KeyValue,
    Put,
    Range,
    Txn,
    TxnResult,
    WatchEvent,
)
from elasticjob_rendezvous.protocol.records.codec import MalformedRecord, decode
from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.keys import Keys, is_number
from elasticjob_rendezvous.protocol.records.members import (
    Done,
    LeaveNotice,
    Member,
    MemberState,
    Round,
    agent_of,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster
from elasticjob_rendezvous.protocol.records.timings import History

T = TypeVar("T")
KEPT_ROSTERS = 20
"""Number of rosters in memory. More than are kept in etcd: the member that deletes them there must
still know of them."""


@dataclass(frozen=True, slots=True)
class Versioned(Generic[T]):
    """Record with its key and revisions."""

    key: str
    record: T
    created: int
    modified: int


class View:
    """Replica of a job's keys; `absorb`, `apply` and `wrote` update it.

    Attributes:
        revision: the newest store revision seen.
        cluster_id: of the etcd that answered last; 0 before the first answer.
        sessions: member id -> session -> record.
        departed: member id -> last record of its last session before its key went.
        leave_notices: member id -> leave notice from a link; until another agent of it registers.
    """

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self.revision = 0
        self.cluster_id = 0
        self.malformed: dict[str, MalformedRecord] = {}
        self.round: Versioned[Round] | None = None
        self.bounds: Versioned[RendezvousParams] | None = None
        self.sessions: dict[str, dict[str, Versioned[Member]]] = {}
        self.rosters: dict[int, Roster] = {}
        self.histories: dict[int, Versioned[History]] = {}
        self.failures: dict[int, dict[str, Failure]] = {}
        self.dones: dict[int, dict[str, Done]] = {}
        self.departed: dict[str, Member] = {}
        self.leave_notices: dict[str, LeaveNotice] = {}
        self._members: dict[str, Versioned[Member]] = {}
        self._newest: dict[str, int] = {}
        self._present: set[str] = set()

    def contradicted_by(
        self, revision: int, ranges: Iterable[tuple[Range, tuple[KeyValue, ...]]]
    ) -> bool:
        """Return True if a read at `revision` cannot come from the store known so far.

        In one store the revision of a key never decreases, and the round is never deleted. An etcd
        that was set up again under its old names keeps its cluster id, so that only this and a
        lower revision show it.
        """
        for target, found in ranges:
            for kv in found:
                if kv.mod_revision < self._newest.get(kv.key, 0) <= revision:
                    return True
            gone = target.covers(self.keys.round) and not target.limit
            gone = gone and all(kv.key != self.keys.round for kv in found)
            if gone and self.round is not None and self.round.modified <= revision:
                return True
        return False

    # -- updates --------------------------------------------------------------------

    def absorb(self, revision: int, ranges: Iterable[tuple[Range, tuple[KeyValue, ...]]]) -> None:
        """Merge the result of a read at `revision`; keys that it did not find are gone."""
        for target, found in ranges:
            for kv in found:
                self._set(kv)
            if target.limit:
                continue
            names = {kv.key for kv in found}
            for key in [k for k in self._present if target.covers(k) and k not in names]:
                self._unset(key, revision)
        self.revision = max(self.revision, revision)

    def apply(self, revision: int, events: Iterable[WatchEvent]) -> None:
        """Merge the events of a watch."""
        for event in events:
            if isinstance(event, Deleted):
                self._unset(event.key, event.mod_revision)
            else:
                self._set(event)
        self.revision = max(self.revision, revision)

    def wrote(self, txn: Txn, result: TxnResult) -> None:
        """Merge the effect of a transaction of this member, and what it read."""
        if result.succeeded:
            for op in txn.success:
                if isinstance(op, DeleteOp):
                    gone = [k for k in self._present if Range(op.key, op.prefix).covers(k)]
                    for key in gone:
                        self._unset(key, result.revision)
                elif isinstance(op, Put):
                    created = self._created(op.key) or result.revision
                    self._set(KeyValue(op.key, op.value, created, result.revision))
        self.absorb(result.revision, result.ranges)

    def merge_leave_notices(self, leaving: Iterable[LeaveNotice]) -> None:
        """Merge leave notices from a link."""
        for notice in leaving:
            self.leave_notices[notice.id] = notice
            member = self.member(notice.id)
            if member is not None:
                self._drop_contradicted_notice(member.record)

    # -- reading --------------------------------------------------------------------

    def member(self, id: str) -> Versioned[Member] | None:
        """Return the valid session of a member: of several the one created last."""
        return self._members.get(id)

    def last_record(self, id: str) -> Member | None:
        """Return a member's record, or its last one before its key went."""
        member = self.member(id)
        return self.departed.get(id) if member is None else member.record

    def leaves(self, id: str) -> str | None:
        """Return a member's reason to leave, by its key or else by a link; None without either."""
        last = self.last_record(id)
        if last is not None and last.state is MemberState.LEAVING:
            return last.reason
        notice = self.leave_notices.get(id)
        return notice.reason if notice is not None and self.member(id) is None else None

    def members(self) -> dict[str, Versioned[Member]]:
        """Return the valid session of each member; not to be changed by the caller."""
        return self._members

    def failures_of(self, number: int) -> dict[str, Failure]:
        """Return the failures of a round; only those of members of its roster count."""
        return self._of_seated(number, self.failures)

    def undone(self, number: int) -> list[RankAssignment]:
        """Return a round's assignments of members not done; none if its roster is unknown."""
        roster, done = self.rosters.get(number), self.dones_of(number)
        return [
            assignment
            for assignment in (roster.seats if roster else ())
            if assignment.id not in done
        ]

    def dones_of(self, number: int) -> dict[str, Done]:
        """Return the successes of a round, of members of its roster."""
        return self._of_seated(number, self.dones)

    def _of_seated(self, number: int, by_round: dict[int, dict[str, T]]) -> dict[str, T]:
        """Return the records about a round of members of its roster.

        After etcd lost its data and newcomers sealed a number again, a member of the earlier round
        of that number may still report on that one.
        """
        found, roster = by_round.get(number, {}), self.rosters.get(number)
        if not found or roster is None:
            return found
        seated = {assignment.id for assignment in roster.seats}
        return {id: record for id, record in found.items() if id in seated}

    def lowest(self) -> Versioned[Member] | None:
        """Return the session of the coordinator: the one created first, of those known here."""
        known = [s for sessions in self.sessions.values() for s in sessions.values()]
        return min(known, key=lambda session: session.created, default=None)

    def known(self) -> int:
        """Return the highest round number that any member has seen."""
        return max(member.record.known for member in self.members().values())

    # -- one key --------------------------------------------------------------------

    def _created(self, key: str) -> int:
        if key not in self._present:
            return 0
        parts = self.keys.parts(key)
        match parts:
            case ("members", id, session):
                return self.sessions[id][session].created
            case ("round",):
                return self.round.created if self.round else 0
            case ("bounds",):
                return self.bounds.created if self.bounds else 0
        return 0

    def _set(self, kv: KeyValue) -> None:
        if kv.mod_revision <= self._newest.get(kv.key, 0):
            return
        self._newest[kv.key] = kv.mod_revision
        self._present.add(kv.key)
        self.malformed.pop(kv.key, None)
        try:
            self._parse(kv)
        except MalformedRecord as error:
            self._drop(kv.key)
            self.malformed[kv.key] = error

    def _unset(self, key: str, revision: int) -> None:
        if revision <= self._newest.get(key, 0):
            return
        self._newest[key] = revision
        self._present.discard(key)
        self.malformed.pop(key, None)
        self._drop(key)

    def _parse(self, kv: KeyValue) -> None:
        def versioned(kind: type[Any]) -> Versioned[Any]:
            record = decode(kind, kv.key, kv.value)
            return Versioned(kv.key, record, kv.create_revision, kv.mod_revision)

        match self.keys.parts(kv.key):
            case ("round",):
                self.round = versioned(Round)
            case ("bounds",):
                self.bounds = versioned(RendezvousParams)
            case ("members", id, session):
                member = versioned(Member)
                self.sessions.setdefault(id, {})[session] = member
                self.departed.pop(id, None)
                self._drop_contradicted_notice(member.record, news=True)
                self._choose_session(id)
            case ("roster",):
                self._keep_roster(decode(Roster, kv.key, kv.value))
            case ("roster", number) if is_number(number):
                self._keep_roster(decode(Roster, kv.key, kv.value))
            case ("history", number) if is_number(number):
                self.histories[int(number)] = versioned(History)
            case ("failures", number, id) if is_number(number):
                failure = decode(Failure, kv.key, kv.value)
                self.failures.setdefault(int(number), {})[id] = failure
            case ("done", number, id) if is_number(number):
                self.dones.setdefault(int(number), {})[id] = decode(Done, kv.key, kv.value)

    def _drop_contradicted_notice(self, member: Member, news: bool = False) -> None:
        """Drop a leave notice that contradicts the record of its member.

        The notice is invalid if the session belongs to another agent than the one that leaves. It
        is also dropped if the agent has written state waiting since: it may stay after all. A
        record that may precede the notice (`news` False) does not show that.
        """
        notice = self.leave_notices.get(member.id)
        if notice is None or member.state is MemberState.LEAVING:
            return
        stays = news and member.state is MemberState.WAITING
        if stays or notice.agent != agent_of(member.session):
            del self.leave_notices[member.id]

    def _choose_session(self, id: str) -> None:
        sessions = self.sessions.get(id)
        if sessions:
            self._members[id] = max(sessions.values(), key=lambda session: session.created)
        else:
            self._members.pop(id, None)

    def _keep_roster(self, roster: Roster) -> None:
        self.rosters[roster.number] = roster
        for old in [number for number in self.rosters if number <= roster.number - KEPT_ROSTERS]:
            del self.rosters[old]

    def _drop(self, key: str) -> None:
        match self.keys.parts(key):
            case ("round",):
                self.round = None
            case ("bounds",):
                self.bounds = None
            case ("members", id, session):
                last = self.sessions.get(id, {}).pop(session, None)
                if not self.sessions.get(id):
                    self.sessions.pop(id, None)
                    if last is not None:
                        self.departed[id] = last.record
                self._choose_session(id)
            case ("roster", number) if is_number(number):
                self.rosters.pop(int(number), None)
            case ("history", number) if is_number(number):
                self.histories.pop(int(number), None)
            case ("failures", number, id) if is_number(number):
                _forget(self.failures, int(number), id)
            case ("done", number, id) if is_number(number):
                _forget(self.dones, int(number), id)


def _forget(by_round: dict[int, dict[str, T]], number: int, id: str) -> None:
    """Drop a member's record of a round; drop the round with its last record."""
    found = by_round.get(number, {})
    found.pop(id, None)
    if not found:
        by_round.pop(number, None)
