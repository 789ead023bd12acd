"""Agents of a job as seen by the operator's informer cache: the test writes their records."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from elasticjob_rendezvous.protocol.records.codec import Record, encode
from elasticjob_rendezvous.protocol.records.keys import Keys, job_prefix
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Counts,
    Member,
    MemberState,
    Outcome,
    Round,
    RoundState,
    Snapshots,
)
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster
from elasticjob_rendezvous.protocol.records.timings import History
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.operator_rig import SECONDS, Namespace


@dataclass
class Agents:
    """Agents of a job; methods write their records of a round."""

    etcd: EtcdServer
    ns: Namespace
    job: str = "job"
    incarnation: int = 1
    charged: tuple[int, ...] = ()
    counts: Counts = field(default_factory=Counts)
    members: dict[str, str] = field(default_factory=dict)
    snapshots: Snapshots | None = None

    @property
    def keys(self) -> Keys:
        uid = self.ns.job(self.job)["metadata"]["uid"]
        return Keys(job_prefix(self.ns.name, uid, self.incarnation))

    def put(self, key: str, record: Record) -> None:
        self.etcd.ctl("put", key, encode(record).decode())

    def join(self, *pods: str) -> None:
        """Let the agents of these pods wait for a round."""
        for name in pods:
            raw = self.ns.get("pods", name)
            assert raw is not None
            self.members[name] = raw["metadata"]["uid"]
            self._say(name, MemberState.WAITING, 0)

    def seal(self, number: int, cause: Cause) -> None:
        """Put all agents into a final round with running workers."""
        names = sorted(self.members)
        seats = tuple(
            RankAssignment(
                self.members[name], name, "10.0.0.1", 1, "default", rank, rank, rank, len(names)
            )
            for rank, name in enumerate(names)
        )
        self.put(self.keys.roster(number), Roster(number, len(seats), "10.0.0.1", 29500, seats))
        self._round(number, RoundState.FINAL, cause)
        final_ms = time.time_ns() // 1_000_000
        history = History(number, cause, len(seats), final_ms, detect_ms=5, stop_ms=120, join_ms=80)
        self.put(self.keys.history(number), history)
        for name in names:
            self._say(name, MemberState.RUNNING, number)

    def close(self, number: int, outcome: Outcome) -> None:
        self._round(number, RoundState.CLOSED, Cause(CauseKind.START), outcome)

    def _round(
        self, number: int, state: RoundState, cause: Cause, outcome: Outcome | None = None
    ) -> None:
        count = len(self.members)
        now_ms = time.time_ns() // 1_000_000
        record = Round(
            number, state, cause, nodes=count, world_size=count, master_name="job-0",
            charged=self.charged, counts=self.counts, outcome=outcome, since_ms=now_ms,
        )  # fmt: skip
        self.put(self.keys.round, record)

    def _say(self, name: str, state: MemberState, number: int) -> None:
        uid = self.members[name]
        member = Member(
            uid, "s1", name, "10.0.0.1", 1, state=state, round=number, snapshots=self.snapshots
        )
        self.put(self.keys.session(uid, "s1"), member)


def running(ns: Namespace, etcd: EtcdServer, count: int) -> Agents:
    """Return the agents of a job of this size that trains in its first round."""
    names = [f"job-{index}" for index in range(count)]
    ns.create_job(minNodes=1, maxNodes=count)
    ns.await_pods(*names)
    for name in names:
        ns.run_pod(name)
    agents = Agents(etcd, ns)
    wait_until(lambda: bool(etcd.ctl("get", agents.keys.bounds)), "bounds", SECONDS)
    agents.join(*names)
    agents.seal(1, Cause(CauseKind.START))
    ns.await_status(phase="Running")

    def all_run() -> bool:
        return all(member["state"] == "running" for member in ns.status()["members"])

    wait_until(all_run, "running members", SECONDS)
    return agents
