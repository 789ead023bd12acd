"""Sidecar's agent with a foreign rendezvous handler."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from elasticjob_agent.agent import Agent
from elasticjob_agent.core.state import LEFT_CODE, Ending, ExitCode
from elasticjob_agent.main import job_reporter, member_settings, run_agent
from elasticjob_agent.polling.node_rendezvous import NodeRendezvous
from elasticjob_agent.runtimes.local import LocalRuntime
from elasticjob_agent.settings import AgentSettings, LogSettings
from elasticjob_agent.worker_runtime import Hello
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.integration.launcher_rig import process_tag
from tests.unit.agent.builders import agent_settings
from tests.unit.agent.memory_rendezvous import Gang, MemoryHandler

__all__ = ["process_tag"]

pytestmark = pytest.mark.usefixtures("process_tag")


@pytest.fixture
def settings(tmp_path: Path) -> AgentSettings:
    return agent_settings(
        LogSettings(tmp_path / "logs"),
        role="trainer",
        bounds=RendezvousParams(1, 2, max_restarts=0),
        bind_address="127.0.0.1",
        termination_log=tmp_path / "termination-log",
    )


def run(settings: AgentSettings, handler: MemoryHandler, code: str) -> Ending:
    async def bounded() -> Ending:
        async with asyncio.timeout(60):
            runtime = LocalRuntime((sys.executable, "-c", code))
            return await run_agent(settings, runtime, "session", handler)

    return asyncio.run(bounded())


def test_success_shuts_rendezvous_down(settings: AgentSettings, tmp_path: Path) -> None:
    handler = Gang().handler()
    code = f"import os; open(r'{tmp_path}/' + os.environ['RANK'], 'w').write(str(os.environ))"
    ending = run(settings, handler, code)
    assert (ending.code, ending.message) == (ExitCode.OK, "job digits succeeded")
    assert handler.calls == ["next_rendezvous", "shutdown", "leave"]
    assert "'ROLE_NAME': 'trainer'" in (tmp_path / "1").read_text()
    assert (tmp_path / "termination-log").read_text() == ending.message


def test_exhausted_restart_budget_names_first_failure(settings: AgentSettings) -> None:
    handler = Gang().handler()
    ending = run(settings, handler, "raise ArithmeticError('no')")
    assert (ending.code, ending.launcher_code) == (ExitCode.FAILED, ExitCode.FAILED)
    assert "on node-1) in round 1: exit code 1, UserError\nArithmeticError: no" in ending.message
    assert handler.calls[:2] == ["next_rendezvous", "set_closed"]


def test_closed_rendezvous_is_not_shut_down_again(settings: AgentSettings) -> None:
    handler = Gang(closed=True).handler()
    ending = run(settings, handler, "pass")
    assert ending.code is ExitCode.RENDEZVOUS
    assert "the gang is closed" in ending.message
    assert handler.calls == ["next_rendezvous", "leave"]


def test_leaving_agent_does_not_close_the_run(settings: AgentSettings) -> None:
    handler = Gang(wanted=2).handler(seconds=30)

    async def bounded() -> Ending:
        rendezvous = NodeRendezvous(settings, handler, lambda before, after: None)
        agent = Agent(settings, LocalRuntime(("true",)), rendezvous.enter)
        async with asyncio.timeout(60):
            running = asyncio.create_task(agent.run())
            while not handler.calls:
                await asyncio.sleep(0.01)
            agent.leave("the pod is deleted")
            return await running

    ending = asyncio.run(bounded())
    assert (ending.code, ending.launcher_code) == (ExitCode.OK, LEFT_CODE)
    assert handler.calls == ["next_rendezvous", "leave"]


def test_signal_does_not_interrupt_leave(settings: AgentSettings) -> None:
    class Leaving(MemoryHandler):
        def leave(self) -> None:
            heeded.append(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL)
            super().leave()

    heeded: list[bool] = []
    assert run(settings, Leaving(Gang()), "pass").code is ExitCode.OK
    assert heeded == [True]


def test_default_rendezvous_is_etcd_v3(settings: AgentSettings) -> None:
    agent = Agent(settings, LocalRuntime(("true",)), lambda state: pytest.fail("not entered"))
    state = replace(agent.progress.state, hello=Hello(("true",), 9, "python", "/", 5000, None))
    uncounted = replace(settings, slots=None)  # the launcher counted the workers in `state`
    member = member_settings(uncounted, "session", state)
    identity, bounds = member.config.identity, member.config.bounds
    assert bounds is not None
    assert (identity.role, identity.slots, bounds.max_restarts) == ("trainer", 2, 0)
    assert identity.id == agent.settings.member == "uid-1"
    assert (identity.launcher_port, member.config.prefix) == (5000, "/elasticjob/default/digits/0/")
    assert json.loads(job_reporter(settings, "session", None).answer())["backend"] == "elasticjob"
