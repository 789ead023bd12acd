"""What etcd holds of one job, as values. Pure: bytes in, records out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from elasticjob_rendezvous.core.codec import MalformedRecord, decode, encode
from elasticjob_rendezvous.core.keys import ROOT, Keys
from elasticjob_rendezvous.core.kv import KeyValue
from elasticjob_rendezvous.core.records import (
    Bounds,
    Cause,
    CauseKind,
    Done,
    Failure,
    History,
    Member,
    Outcome,
    Roster,
    Round,
    RoundState,
)


@dataclass(frozen=True, slots=True)
class Records:
    """One job's rendezvous at one revision of etcd.

    `members` holds one session of each member, the newest, in the order in which they came.
    `malformed` names what could not be read: another program may write below this prefix.
    """

    prefix: str
    bounds: Bounds | None = None
    round: Round | None = None
    members: tuple[Member, ...] = ()
    rosters: dict[int, Roster] = field(default_factory=dict)
    histories: dict[int, History] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()
    dones: tuple[Done, ...] = ()
    malformed: tuple[str, ...] = ()

    @property
    def roster(self) -> Roster | None:
        """The roster of the last final round."""
        if self.round is None:
            return None
        sealed = self.round.state in (RoundState.FINAL, RoundState.CLOSED)
        return self.rosters.get(self.round.number if sealed else self.round.previous) or (
            self.rosters.get(self.round.previous)
        )


def prefix_of(key: str) -> str:
    """The prefix of the job that a key belongs to; empty for a key of nobody."""
    parts = key.removeprefix(ROOT).split("/", 3)
    if not key.startswith(ROOT) or len(parts) < 4:
        return ""
    return ROOT + "/".join(parts[:3]) + "/"


def records(prefix: str, kvs: Iterable[KeyValue]) -> Records:
    """Read what is stored below `prefix`; what is malformed is named and left out."""
    keys = Keys(prefix)
    reading = _Reading()
    for kv in sorted(kvs, key=lambda kv: kv.create_revision):
        try:
            reading.take(keys.parts(kv.key), kv)
        except MalformedRecord as error:
            reading.malformed.append(str(error))
    return Records(
        prefix=prefix,
        bounds=reading.bounds,
        round=reading.round,
        members=tuple(reading.members.values()),
        rosters=reading.rosters,
        histories=reading.histories,
        failures=tuple(reading.failures),
        dones=tuple(reading.dones),
        malformed=tuple(reading.malformed),
    )


@dataclass(slots=True)
class _Reading:
    bounds: Bounds | None = None
    round: Round | None = None
    members: dict[str, Member] = field(default_factory=dict)
    rosters: dict[int, Roster] = field(default_factory=dict)
    histories: dict[int, History] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    dones: list[Done] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)

    def take(self, parts: tuple[str, ...], kv: KeyValue) -> None:
        match parts:
            case ("bounds",):
                self.bounds = decode(Bounds, kv.key, kv.value)
            case ("round",):
                self.round = decode(Round, kv.key, kv.value)
            case ("members", member, _):
                # Of two sessions the later creation wins; it comes later here.
                self.members.pop(member, None)
                self.members[member] = decode(Member, kv.key, kv.value)
            case ("roster", _):
                roster = decode(Roster, kv.key, kv.value)
                self.rosters[roster.number] = roster
            case ("history", _):
                history = decode(History, kv.key, kv.value)
                self.histories[history.number] = history
            case ("failures", _, _):
                self.failures.append(decode(Failure, kv.key, kv.value))
            case ("done", _, _):
                self.dones.append(decode(Done, kv.key, kv.value))


def closed(before: KeyValue | None, outcome: Outcome, utc_ms: int) -> bytes | None:
    """The round's record closed with `outcome`; None when it is closed already."""
    if before is None:
        start = Round(number=1, state=RoundState.CLOSED, cause=Cause(CauseKind.START))
        return encode(replace(start, outcome=outcome, since_ms=utc_ms))
    found = decode(Round, before.key, before.value)
    if found.state is RoundState.CLOSED:
        return None
    return encode(replace(found, state=RoundState.CLOSED, outcome=outcome, since_ms=utc_ms))
