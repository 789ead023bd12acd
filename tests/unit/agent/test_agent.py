"""Agent shell with a scripted worker runtime and a scripted rendezvous: faults and probes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Self

import pytest

from elasticjob_agent.agent import Agent
from elasticjob_agent.core.poll_step import LocalChanged as ToldLocal
from elasticjob_agent.core.poll_step import Phase, Polled, PollingState, PollingTerms, poll_step
from elasticjob_agent.core.state import Ending, ExitCode
from elasticjob_agent.main import LogFormatter
from elasticjob_agent.settings import AgentSettings, LogSettings
from elasticjob_agent.status_server import JobReporter, serve_status
from elasticjob_agent.worker_runtime import (
    Hello,
    PrepareWorkers,
    Started,
    StartWorkers,
    Stopped,
    WorkerExited,
    WorkerRuntimeError,
    WorkerRuntimeEvent,
    WorkerRuntimeLost,
)
from elasticjob_rendezvous.protocol.config import Identity
from elasticjob_rendezvous.protocol.directives import Directive, Finish, Idle, Left, Run
from elasticjob_rendezvous.protocol.records import agent_reports
from elasticjob_rendezvous.protocol.records.members import Outcome, OutcomeKind
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.worker_group import Local, Workers
from tests.unit.agent.builders import ME, agent_settings, roster

HELLO = Hello(("python", "train.py"), 9, "python", "/", 5000, None, env_names=frozenset({"PATH"}))


class FakeRuntime:
    """Runtime that starts nothing: every worker ends with success at once."""

    def __init__(self, *, lose_starts: int = 0, gone: Exception | None = None) -> None:
        self.said: asyncio.Queue[WorkerRuntimeEvent] = asyncio.Queue()
        self.said.put_nowait(HELLO)
        self.started: list[StartWorkers] = []
        self.released: list[tuple[int, str]] = []
        self.closed = False
        self.counted: int | None = None
        self.count_ends = asyncio.Event()
        self.count_ends.set()
        self._lose = lose_starts
        self._gone = gone

    async def node_workers(self) -> int | None:
        if self._gone is not None:
            raise self._gone
        await self.count_ends.wait()
        return self.counted

    async def events(self) -> AsyncIterator[WorkerRuntimeEvent]:
        if self._gone is not None:
            raise self._gone
        while True:
            event = await self.said.get()
            yield event
            if isinstance(event, WorkerRuntimeLost):
                return

    def set_deadline(self, live_until: Callable[[], float | None]) -> None:
        self.live_until = live_until

    def renew(self) -> None:
        self.renewals = True

    async def prepare(self, command: PrepareWorkers) -> None:
        raise AssertionError("this hello does not offer it")

    async def start(self, command: StartWorkers) -> None:
        if self._lose:
            self._lose -= 1
            self.said.put_nowait(HELLO)  # as after a reconnection
            raise WorkerRuntimeError("the connection broke")
        self.started.append(command)
        ranks = [worker.local_rank for worker in command.workers]
        self.said.put_nowait(Started(command.round, {rank: 100 + rank for rank in ranks}))
        for rank in ranks:
            self.said.put_nowait(WorkerExited(command.round, rank, 100 + rank, 0, None, 1))
        self.said.put_nowait(Stopped(command.round))

    async def stop(
        self,
        round: int,
        grace_seconds: float,
        dump: bool = False,
        *,
        copies: bool = True,
        ends_step: bool = False,
    ) -> None:
        self.said.put_nowait(Stopped(round))

    async def signal(self, round: int, signum: int) -> None:
        raise AssertionError("the agent sends no other signals")

    async def release(self, exit_code: int, message: str) -> None:
        self.released.append((exit_code, message))
        self.said.put_nowait(WorkerRuntimeLost("released"))

    async def aclose(self) -> None:
        self.closed = True


class Rendezvous:
    """Rendezvous that seats this node in round 1 and ends the job when it is done."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.told: list[Local] = []
        self.says: asyncio.Queue[Directive | Exception] = asyncio.Queue()
        self.says.put_nowait(fault or Idle("registering"))
        self.left = False
        self.registered = True
        self.live_until: float | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.left = True

    def on_evidence(self, renewed: Callable[[], None]) -> None:
        self.renewed = renewed

    def report(self, local: Local) -> None:
        self.told.append(local)
        if local.leaving and local.workers is Workers.NONE:
            self.says.put_nowait(Left())
        elif local.done:
            self.says.put_nowait(Finish(Outcome(OutcomeKind.SUCCEEDED)))
        elif local.ready and local.round == 0:
            self.says.put_nowait(Run(roster(1), ME))

    async def directives(self) -> AsyncIterator[Directive]:
        while True:
            said = await self.says.get()
            if isinstance(said, Exception):
                raise said
            yield said


@pytest.fixture
def settings(tmp_path: Path) -> AgentSettings:
    return agent_settings(
        LogSettings(tmp_path / "logs"), bind_address="127.0.0.1", control=tmp_path / "control"
    )


def run(settings: AgentSettings, runtime: FakeRuntime, rendezvous: Rendezvous) -> Ending:
    async def bounded() -> Ending:
        async with asyncio.timeout(60):
            return await Agent(settings, runtime, lambda _: rendezvous).run()

    return asyncio.run(bounded())


def test_agent_runs_from_hello_to_success(settings: AgentSettings) -> None:
    runtime, rendezvous = FakeRuntime(), Rendezvous()
    ending = run(settings, runtime, rendezvous)
    assert ending == Ending(ExitCode.OK, 0, "job digits succeeded")
    assert runtime.released == [(0, "job digits succeeded")]
    assert runtime.closed
    assert rendezvous.left
    workers = runtime.started[0].workers
    assert [worker.prefix for worker in workers] == ["[2] ", "[3] "]
    assert workers[0].argv == ("python", "train.py")
    assert workers[1].log_dir == str(settings.logs.folder) + "/round_1/1"
    assert workers[1].env["TORCHELASTIC_ERROR_FILE"] == f"{workers[1].log_dir}/error.json"


def test_agent_learns_its_number_of_workers_before_it_enters_the_rendezvous(
    settings: AgentSettings, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, numbers = FakeRuntime(), []
    runtime.counted = 2
    agent: Agent

    def enter(_: object) -> Rendezvous:
        numbers.append(agent.progress.state.facts.slots)
        return Rendezvous()

    async def bounded() -> Ending:
        nonlocal agent
        agent = Agent(replace(settings, slots=None), runtime, enter)
        assert agent.progress.state.facts.slots == 0
        async with asyncio.timeout(60):
            return await agent.run()

    with caplog.at_level(logging.INFO):
        assert asyncio.run(bounded()).code is ExitCode.OK
    assert numbers == [2]
    assert "this node runs 2 workers" in caplog.text
    assert len(runtime.started[0].workers) == 2


def test_agent_leaves_while_the_number_of_workers_is_unknown(settings: AgentSettings) -> None:
    runtime = FakeRuntime()
    runtime.count_ends.clear()

    async def bounded() -> Ending:
        agent = Agent(replace(settings, slots=None), runtime, lambda _: Rendezvous())
        agent.leave("SIGTERM")
        async with asyncio.timeout(60):
            return await agent.run()

    ending = asyncio.run(bounded())
    assert ending == Ending(ExitCode.OK, 143, "job digits: node-1 left (SIGTERM)")


def test_launcher_that_counts_nothing_means_the_configured_number(
    settings: AgentSettings,
) -> None:
    configured = FakeRuntime()
    assert run(settings, configured, Rendezvous()).code is ExitCode.OK
    assert len(configured.started[0].workers) == 2
    ending = run(replace(settings, slots=None), FakeRuntime(), Rendezvous())
    assert ending.code is ExitCode.FAILED
    assert "the launcher did not count the workers" in ending.message


def test_lost_start_is_repeated(settings: AgentSettings) -> None:
    runtime = FakeRuntime(lose_starts=1)
    assert run(settings, runtime, Rendezvous()).code is ExitCode.OK
    assert len(runtime.started) == 1


def test_full_disk_loses_only_log_files(settings: AgentSettings, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("not a folder")
    runtime = FakeRuntime()
    assert run(settings, runtime, Rendezvous()).code is ExitCode.OK
    assert {worker.log_dir for worker in runtime.started[0].workers} == {""}
    assert "TORCHELASTIC_ERROR_FILE" not in runtime.started[0].workers[0].env


def test_unavailable_worker_runtime_ends_the_agent(settings: AgentSettings) -> None:
    runtime = FakeRuntime(gone=WorkerRuntimeError("cannot start python"))
    ending = run(settings, runtime, Rendezvous())
    assert ending.code is ExitCode.FAILED
    assert "cannot start python" in ending.message


def test_agent_fault_is_reported_and_releases_the_launcher(
    settings: AgentSettings, caplog: pytest.LogCaptureFixture
) -> None:
    runtime, rendezvous = FakeRuntime(), Rendezvous(fault=ZeroDivisionError("a defect"))
    ending = run(settings, runtime, rendezvous)
    assert ending.code is ExitCode.INTERNAL
    assert "ZeroDivisionError: a defect" in ending.message
    assert runtime.closed
    assert not runtime.released, "a launcher keeps its workers for the next agent"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_second_signal_does_not_interrupt_leaving(
    settings: AgentSettings, signum: signal.Signals
) -> None:
    class Slow(Rendezvous):
        async def __aexit__(self, *_: object) -> None:
            default = (signal.SIG_DFL, signal.default_int_handler)
            assert signal.getsignal(signum) not in default, "it would end this process"
            os.kill(os.getpid(), signum)
            await asyncio.sleep(0)
            await super().__aexit__()

    rendezvous, before = Slow(), signal.getsignal(signum)
    assert run(settings, FakeRuntime(), rendezvous).code is ExitCode.OK
    assert rendezvous.left
    assert signal.getsignal(signum) == before


def test_health_probes_and_leave_request(settings: AgentSettings) -> None:
    asyncio.run(probes_and_the_leave(settings))


async def probes_and_the_leave(settings: AgentSettings) -> None:
    class Waiting(Rendezvous):
        def report(self, local: Local) -> None:
            super().report(replace(local, ready=False))

    control = settings.control
    assert control is not None
    rendezvous = Waiting()
    rendezvous.registered = False
    agent = Agent(settings, FakeRuntime(), lambda _: rendezvous)
    async with asyncio.timeout(60), serve_status(agent, "127.0.0.1", None, control):
        assert await asked(control, "GET /ready") == (503, {"ready": False})
        code, said = await verb(control, "ready")
        assert code == 1
        assert "no launcher yet, or no lease" in said
        running = asyncio.create_task(agent.run())
        while not (await asked(control, "GET /status"))[1]["launcher"]:
            await asyncio.sleep(0.01)
        assert await asked(control, "GET /ready") == (503, {"ready": False}), "it has no lease"
        rendezvous.registered = True
        assert await asked(control, "GET /ready") == (200, {"ready": True})
        assert await verb(control, "ready") == (0, "")
        code, status = await asked(control, "GET /status")
        assert (code, status["name"], status["workers"]) == (200, "node-1", "none")
        assert (await asked(control, "GET /live"))[0] == 200
        assert (await asked(control, "GET /secrets"))[0] == 404
        assert await verb(control, "leave", "the pod is deleted, 100%") == (0, "")
        ending = await running
    assert ending.code is ExitCode.OK
    assert "left (the pod is deleted, 100%)" in ending.message
    assert not control.exists()


def reporter(job_key: bytes = b"") -> JobReporter:
    who = Identity(ME, "node-1", "10.0.0.2", 0)
    return JobReporter(
        who, "s", "/elasticjob/default/digits/0/", RendezvousParams(1, 4), "c10d", job_key
    )


def test_agent_report_requires_the_job_key(settings: AgentSettings) -> None:
    asyncio.run(the_rendezvous_is_told(settings))


async def the_rendezvous_is_told(settings: AgentSettings) -> None:
    control, told = settings.control, reporter(b"secret")
    assert control is not None
    agent = Agent(settings, FakeRuntime(), lambda _: Rendezvous())
    before = PollingState(PollingTerms(ME, "digits", 3, 7.0))
    after, _ = poll_step(before, ToldLocal(Local(ready=True)), 0.0)
    told.stepped(before, after)
    async with asyncio.timeout(60), serve_status(agent, "127.0.0.1", None, control, told):
        assert (await asked(control, "GET /rendezvous"))[0] == 403
        now_ms = time.time_ns() // 1_000_000
        request = agent_reports.ReportRequest(ME, "ab" * 16, now_ms)
        other = agent_reports.ReportRequest("another member", "ab" * 16, now_ms)
        right = agent_reports.headers(b"secret", request)
        wrong = agent_reports.headers(b"guess", request), agent_reports.headers(b"secret", other)
        for headers in wrong:
            assert (await asked(control, "GET /rendezvous", headers))[0] == 403
        code, body = await asked(control, "GET /rendezvous", right)
    assert (code, body["backend"], body["member"], body["state"]) == (200, "c10d", ME, "joinable")
    answer = agent_reports.read(json.dumps(body).encode())
    assert set(answer.records) == {"state/bounds", "state/round", f"members/{ME}/s"}


def test_agent_report_is_setting_up_until_rendezvous_is_joinable() -> None:
    who, here = Identity(ME, "node-1", "10.0.0.2", 0), False
    told = JobReporter(
        who,
        "s",
        "/elasticjob/default/digits/0/",
        RendezvousParams(1, 4),
        "c10d",
        b"",
        lambda: not here,
    )
    assert agent_reports.read(told.answer()).state == "", "nothing is sought yet"
    before = PollingState(PollingTerms(ME, "digits", 3, 7.0))
    seeking, _ = poll_step(before, ToldLocal(Local(ready=True)), 0.0)
    told.stepped(before, seeking)
    assert agent_reports.read(told.answer()).state == "setup"
    here = True
    assert agent_reports.read(told.answer()).state == "joinable"


def test_etcd_v3_agent_serves_no_agent_report(settings: AgentSettings) -> None:
    async def ask() -> int:
        agent = Agent(settings, FakeRuntime(), lambda _: Rendezvous())
        assert settings.control is not None
        async with asyncio.timeout(60), serve_status(agent, "127.0.0.1", None, settings.control):
            return (await asked(settings.control, "GET /rendezvous"))[0]

    assert asyncio.run(ask()) == 404


def test_agent_report_of_outcome_is_kept_until_read() -> None:
    async def ends() -> None:
        told = reporter()
        await told.end_read()  # nothing has ended
        told.answer()
        before = PollingState(PollingTerms(ME, "digits", 3, 7.0), Phase.MEETING, number=1)
        told.stepped(before, poll_step(before, Polled(met=True), 0.0)[0])
        waiting = asyncio.create_task(told.end_read())
        await asyncio.sleep(0)
        assert not waiting.done()
        assert b"succeeded" in told.answer()
        async with asyncio.timeout(60):
            await waiting

    asyncio.run(ends())


async def verb(control: Path, *words: str) -> tuple[int | None, str]:
    """Return exit code and error output of a process such as a probe or a preStop."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "elasticjob_agent", *words),
        env={"ELASTICJOB_CONTROL": str(control)},
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    return process.returncode, said.decode()


async def asked(
    control: Path, request: str, headers: Mapping[str, str] | None = None
) -> tuple[int, dict[str, object]]:
    reader, writer = await asyncio.open_unix_connection(control)
    lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
    writer.write(f"{request} HTTP/1.1\r\n{lines}\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), json.loads(body)


def test_log_message_of_a_peer_looks_like_no_other_message() -> None:
    record = logging.makeLogRecord({"msg": "left: a\x1b[2J\u202e\n2026-01-31 ERROR forged"})
    written = LogFormatter("%(levelname)s %(message)s").format(record)
    assert written == "INFO left: a\\x1b[2J\\u202e\n  2026-01-31 ERROR forged".replace(
        "INFO", record.levelname
    )


def test_agent_report_is_printable() -> None:
    said = {"backend": "c10d\x1b", "member": "m\n", "state": "\u202e", "records": []}
    store = {"store": "etcd", "state": "unreachable", "endpoint": "e\x9b", "text": "t\x1b[2J"}
    told = agent_reports.read(json.dumps({**said, "store": {**store, "sinceMs": 1}}).encode())
    assert (told.backend, told.member, told.state) == (r"c10d\x1b", r"m\n", r"\u202e")
    assert told.store is not None
    assert (told.store.endpoint, told.store.text) == (r"e\x9b", r"t\x1b[2J")
