"""Fake agents for the operator: HTTP servers at the addresses of a job's pods."""

from __future__ import annotations

import base64
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

from elasticjob_operator.domain.manifests.names import HEALTH_PORT
from elasticjob_rendezvous.protocol.records.agent_reports import (
    PATH,
    AgentReport,
    agent_report,
    answer_headers,
    proven,
    written,
)
from elasticjob_rendezvous.protocol.records.keys import Keys, job_prefix
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Member,
    MemberState,
    Outcome,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster
from elasticjob_rendezvous.protocol.records.timings import History
from tests.integration.etcd_server import wait_until
from tests.integration.operator_rig import SECONDS, Namespace

_hosts = count(1)


def address() -> str:
    """Return an unused loopback address: all agents answer at the same port."""
    number, pid = next(_hosts), os.getpid()
    return f"127.{1 + pid % 250}.{(pid // 250 + number // 250) % 256}.{1 + number % 250}"


@dataclass
class FakeAgent:
    """Agent that answers `says` to requests signed with the job's key."""

    uid: str
    job_key: bytes
    address: str = field(default_factory=address)
    says: AgentReport = field(default_factory=lambda: AgentReport("c10d", "", {}))
    asked: int = 0

    @contextmanager
    def answering(self) -> Iterator[FakeAgent]:
        agent = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                given = {name.lower(): value for name, value in self.headers.items()}
                known = proven(agent.job_key, given, agent.uid, time.time_ns() // 1_000_000)
                agent.asked += 1
                self.send_response(200 if self.path == PATH and known else 403)
                body = json.dumps(written(agent.says)).encode()
                if known:
                    for pair in answer_headers(agent.job_key, known, body).items():
                        self.send_header(*pair)
                self.end_headers()
                if known:
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        with ThreadingHTTPServer((self.address, HEALTH_PORT), Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


@dataclass
class Gang:
    """Agents of a job's pods, and their common state."""

    ns: Namespace
    agents: dict[str, FakeAgent] = field(default_factory=dict)
    job: str = "job"
    incarnation: int = 0

    @property
    def keys(self) -> Keys:
        uid = self.ns.job(self.job)["metadata"]["uid"]
        return Keys(job_prefix(self.ns.name, uid, self.incarnation))

    @contextmanager
    def of(self, name: str) -> Iterator[FakeAgent]:
        """Run the pod until it is Ready, with an agent that answers."""
        raw = self.ns.get("pods", name)
        assert raw is not None
        self.incarnation = int(raw["metadata"]["labels"]["elasticjob.dev/incarnation"])
        with FakeAgent(raw["metadata"]["uid"], self._job_key()).answering() as agent:
            self.agents[name] = agent
            self.ns.run_pod(name)
            self.ns.set_pod(name, podIP=agent.address, podIPs=[{"ip": agent.address}])
            try:
                yield agent
            finally:
                del self.agents[name]

    def _job_key(self) -> bytes:
        name = f"{self.job}-elasticjob"
        wait_until(lambda: self.ns.get("secrets", name) is not None, "the Secret", SECONDS)
        secret = self.ns.get("secrets", name)
        assert secret is not None
        return base64.b64decode(secret["data"]["job-key"])

    def seal(self, number: int, kind: CauseKind = CauseKind.START) -> None:
        """Put all agents into a final round; each one reports only its own name."""
        names, keys = sorted(self.agents), self.keys
        words: dict[str, AgentReport] = {}
        for rank, name in enumerate(names):
            seats = tuple(
                RankAssignment(
                    self.agents[other].uid if other == name else "",
                    other if other == name else "",
                    "10.0.0.1", 1, "default", place, place, place, len(names),
                )
                for place, other in enumerate(names)
            )  # fmt: skip
            roster = Roster(number, len(names), "10.0.0.1", 1234, seats)
            found = Round(
                number,
                RoundState.FINAL,
                Cause(kind),
                nodes=len(names),
                world_size=len(names),
                master_name=names[0] if rank == 0 else "",
                since_ms=1_000_000,
            )
            history = History(number, Cause(kind), len(names), join_ms=30)
            told = {keys.roster(number): roster, keys.history(number): history}
            words[name] = self._word(keys, name, MemberState.RUNNING, found, told)
        self._say(words)

    def end(self, outcome: Outcome, **others: Any) -> None:
        """End the job; all agents report the outcome."""
        keys = self.keys
        closed = Round(1, RoundState.CLOSED, Cause(CauseKind.START), outcome=outcome, **others)
        self._say(
            {name: self._word(keys, name, MemberState.DONE, closed, {}) for name in self.agents}
        )

    def _word(
        self, keys: Keys, name: str, state: MemberState, found: Round, others: dict[str, object]
    ) -> AgentReport:
        uid = self.agents[name].uid
        member = Member(uid, "s", name, "10.0.0.1", 0, state=state, round=found.number)
        records: dict[str, object] = {keys.round: found, keys.session(uid, "s"): member, **others}
        return agent_report(keys.prefix, "c10d", uid, records, found.state.value)

    def _say(self, words: dict[str, AgentReport]) -> None:
        """Change all answers at nearly the same moment, so that no poll sees half a gang."""
        for name, word in words.items():
            self.agents[name].says = word
