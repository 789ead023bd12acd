"""Fluent builders of a job's keys in a simulated etcd, and one agent's view of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from elasticjob_rendezvous.protocol.config import Config, Identity
from elasticjob_rendezvous.protocol.coordinator.coordinator import decide
from elasticjob_rendezvous.protocol.coordinator.memory import Coordinator
from elasticjob_rendezvous.protocol.coordinator.round_writes import RoundUpdate
from elasticjob_rendezvous.protocol.events import Clock, Probed, Verdict
from elasticjob_rendezvous.protocol.kv import Delete, Put, Range, Txn, TxnResult
from elasticjob_rendezvous.protocol.liveness.failure_detector import FailureDetector
from elasticjob_rendezvous.protocol.liveness.peer_state import MemberEvent
from elasticjob_rendezvous.protocol.member_key import MemberKey
from elasticjob_rendezvous.protocol.records.codec import decode, encode
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.keys import Keys, job_prefix
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Done,
    Member,
    MemberState,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster, seal
from elasticjob_rendezvous.protocol.replica import Versioned, View
from elasticjob_rendezvous.protocol.worker_group import Local
from tests.sim.etcd.simulated_etcd import SimEtcd

KEYS = Keys(job_prefix("team", "uid", 0))
START = 1000.0
UTC_MS = 1_700_000_000_000
ORPHAN_SECONDS = 30.0


def identity(name: str) -> str:
    """Return the id of the member named `name`."""
    return f"id-{name}"


def a_member(name: str, **changes: Any) -> Member:
    """Return a waiting member with these changes."""
    return replace(
        Member(identity(name), "s1", name, f"host-{name}", 7000, 7001, master_port=20000),
        **changes,
    )


def a_failure(name: str, round: int = 1, **changes: Any) -> Failure:
    """Return a worker's error at this member, with these changes."""
    base = Failure(
        round, identity(name), name, 0, 0, FailureClass.USER_ERROR, at_ms=UTC_MS, exit_code=1
    )
    return replace(base, **changes)


def a_round(number: int = 1, state: RoundState = RoundState.JOINABLE, **changes: Any) -> Round:
    return replace(Round(number, state, Cause(CauseKind.START)), **changes)


class Job:
    """Job of waiting members, the first of which coordinates.

    Time begins at START and moves only by `later`. Records go through the real codec and the
    simulated etcd, which decides transactions as etcd does.
    """

    def __init__(self, *names: str, **bounds: Any) -> None:
        self.etcd = SimEtcd()
        self.now = START
        self._view = View(KEYS)
        self.bounds(**bounds)
        self.coordinator = Coordinator()
        self.leader = names[0] if names else ""
        self.initial_bounds: RendezvousParams | None = (
            None  # from the coordinator, without an operator
        )
        for name in names:
            self.member(name)
        self.coordinator.take_over(self.now, ())

    # -- contents of etcd -------------------------------------------------------------

    def put(self, key: str, record: object) -> Self:
        self.etcd.txn(Txn((), (Put(key, encode(record)),)))
        return self

    def delete(self, key: str) -> Self:
        self.etcd.txn(Txn((), (Delete(key),)))
        return self

    def bounds(self, **fields: Any) -> Self:
        return self.put(KEYS.bounds, RendezvousParams(**{"min_nodes": 1, "max_nodes": 4, **fields}))

    def member(self, name: str, **fields: Any) -> Self:
        """Write a member's whole record."""
        record = a_member(name, **fields)
        put = Put(KEYS.session(record.id, record.session), encode(record), record.lease)
        self.etcd.txn(Txn((), (put,)))
        return self

    def change(self, name: str, **fields: Any) -> Self:
        """Change a member's record."""
        stored = self.stored(name)
        return self.put(stored.key, replace(stored.record, **fields))

    def gone(self, *names: str, proven: bool = False) -> Self:
        """Delete these members' keys: by an expired lease, or, if `proven`, after a probe."""
        for name in names:
            stored = self.stored(name)
            self.delete(stored.key)
            if proven:
                self.answers(name, Verdict.GONE, stored.record.session)
        return self

    def answers(self, name: str, verdict: Verdict, session: str = "s1") -> Self:
        """Deliver a probe's verdict on this member."""
        answer = Probed(identity(name), session, verdict)
        self.coordinator.peers.probed(answer, self.view(), self.now, ORPHAN_SECONDS)
        return self

    def brings(self, bounds: RendezvousParams) -> Self:
        """Remove the bounds, except those with which the coordinator was started."""
        self.initial_bounds = bounds
        return self.delete(KEYS.bounds)

    def round(self, number: int, state: RoundState = RoundState.JOINABLE, **fields: Any) -> Self:
        return self.put(KEYS.round, a_round(number, state, **fields))

    def sealed(self, *names: str, number: int = 1, restarts: int = 0, **fields: Any) -> Self:
        """Seal a final round of these members, whose workers run."""
        members = [self.stored(name).record for name in names]
        self.put(KEYS.roster(number), seal(number, members, restarts))
        for name in names:
            self.change(name, state=MemberState.RUNNING, round=number)
        nodes = {"nodes": len(names), "previous": number}
        return self.round(number, RoundState.FINAL, **{**nodes, **fields})

    def failure(self, name: str, round: int = 1, **fields: Any) -> Self:
        return self.put(KEYS.failure(round, identity(name)), a_failure(name, round, **fields))

    def done(self, *names: str, round: int = 1) -> Self:
        for name in names:
            self.put(KEYS.done(round, identity(name)), Done(round, identity(name), name))
        return self

    def later(self, seconds: float) -> Self:
        self.now += seconds
        return self

    # -- views and acts ---------------------------------------------------------------

    @property
    def clock(self) -> Clock:
        return Clock(self.now, UTC_MS + int((self.now - START) * 1000))

    def view(self) -> View:
        """Return this observer's replica, up to date with etcd."""
        everything = Range(KEYS.prefix, prefix=True)
        found = self.etcd.range(everything)
        self._view.absorb(found.revision, ((everything, found.kvs),))
        self._view.cluster_id = found.cluster_id
        return self._view

    def stored(self, name: str) -> Versioned[Member]:
        member = self.view().member(identity(name))
        assert member is not None, f"{name} has no session"
        return member

    def decide(self) -> RoundUpdate | None:
        """Return the coordinator's next act, if any."""
        own = self.stored(self.leader)
        act = decide(self.coordinator, self.view(), own, self.clock, self.initial_bounds)
        if not self.coordinator.must_read:
            return act
        assert act is None
        self.coordinator.checked = self.coordinator.doubted  # `view` has read everything
        return decide(self.coordinator, self.view(), own, self.clock, self.initial_bounds)

    def commit(self, txn: Txn) -> TxnResult:
        return self.etcd.txn(txn)

    def act(self) -> Round:
        """Commit the coordinator's act, which must exist and succeed; return the round after it."""
        act = self.decide()
        assert act is not None, "the coordinator had nothing to do"
        assert self.commit(act.txn).succeeded, "the coordinator's write was refused"
        return self.current()

    def idle(self) -> Self:
        """Check that the coordinator has nothing to do now."""
        act = self.decide()
        assert act is None, f"unexpected: {act.note}"
        return self

    def current(self) -> Round:
        round = self.view().round
        assert round is not None
        return round.record

    def roster(self, number: int) -> Roster:
        return self.view().rosters[number]

    def read(self, kind: type[Any], key: str) -> Any:
        stored = self.etcd.get(key)
        assert stored is not None, f"nothing at {key}"
        return decode(kind, key, stored.value)

    def names(self) -> set[str]:
        """Return the names of members with a valid session."""
        return {member.record.name for member in self.view().members().values()}

    def own(self, name: str, **fields: Any) -> MemberKey:
        """Return the state from which the member `name` makes its transactions."""
        local = fields.pop("local", Local(ready=True, master_port=20000))
        bounds = fields.pop("bounds", None)
        config = Config(
            KEYS.prefix,
            Identity(identity(name), name, f"host-{name}", 7000, 7001),
            session_nonce="s",
            bounds=bounds,
        )
        plain = {"session": "s1", "lease": 0, "lease_holds": True, "leaving": "", "known": 0}
        return MemberKey(config=config, view=self.view(), local=local, **{**plain, **fields})


def inquiries(peers: FailureDetector) -> set[str]:
    """Return the members that are probed repeatedly."""
    return {member for member, peer in peers.states.items() if peer.inquiry is not None}


def lose_link(peers: FailureDetector, member: str, at: float) -> None:
    """Note that the link of a member was lost at this time, without a probe."""
    peers.take(member, MemberEvent.LINK_LOST).symptom = at
