"""Short builders of the agent core's values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from elasticjob_agent.core.commands import Command
from elasticjob_agent.core.events import (
    DirectiveChanged,
    Event,
    PortReserved,
    RuntimeEvent,
)
from elasticjob_agent.core.state import Facts, State
from elasticjob_agent.core.step import step
from elasticjob_agent.settings import AgentSettings, EtcdAccess, LogSettings
from elasticjob_agent.worker_runtime import Hello, Started, Stopped, WorkerExited
from elasticjob_rendezvous.protocol.directives import Directive, Finish, Run, Stop
from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind, Outcome, OutcomeKind
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster

ME = "uid-1"
FACTS = Facts(ME, "node-1", "rack-a", slots=2, stop_grace_seconds=7.0, run_id="digits")
Kind = TypeVar("Kind")


def agent_settings(logs: LogSettings, **changes: Any) -> AgentSettings:
    """Return the settings of an agent with two workers whose etcd does not exist."""
    return AgentSettings(
        prefix="/elasticjob/default/digits/0/",
        run_id="digits",
        member=ME,
        name="node-1",
        address="127.0.0.1",
        etcd=EtcdAccess(("127.0.0.1:1",)),
        job_key=b"k",
        slots=2,
        logs=logs,
        **changes,
    )


def roster(number: int = 1, slots: int = 2, restarts: int = 0, mine: bool = True) -> Roster:
    """Return a roster of two nodes, this one being the second, or of one without this node."""
    seats = [RankAssignment("uid-0", "node-0", "10.0.0.1", slots, "default", 0, 0, 0, 2 * slots)]
    if mine:
        seats.append(
            RankAssignment(ME, "node-1", "10.0.0.2", slots, "default", 1, slots, slots, 2 * slots)
        )
    return Roster(number, 2 * slots, "10.0.0.1", 29400 + number, tuple(seats), restarts)


def run(number: int = 1, **options: Any) -> DirectiveChanged:
    return DirectiveChanged(Run(roster(number, **options), ME, 3))


def stop(
    number: int = 1, kind: CauseKind = CauseKind.JOIN, grace: float = 10.0
) -> DirectiveChanged:
    kill = kind in (CauseKind.LOSS, CauseKind.FAILURE)
    return DirectiveChanged(Stop(number, kill, Cause(kind, ("node-0",)), 0.0 if kill else grace))


def finish(
    kind: OutcomeKind = OutcomeKind.SUCCEEDED, failure: Failure | None = None, grace: float = 10.0
) -> DirectiveChanged:
    return DirectiveChanged(Finish(Outcome(kind, "why"), failure, grace))


def directed(directive: Directive) -> DirectiveChanged:
    return DirectiveChanged(directive)


def hello(running: int | None = None, *exits: WorkerExited, **options: Any) -> RuntimeEvent:
    pids = {0: 100, 1: 101} if running is not None else {}
    event = Hello(("python", "train.py"), 9, "python", "/", 5000, running, pids, exits)
    return RuntimeEvent(event, **options)


def started(number: int = 1) -> RuntimeEvent:
    return RuntimeEvent(Started(number, {0: 100, 1: 101}))


def ended(
    local_rank: int = 0,
    code: int | None = 0,
    signum: int | None = None,
    number: int = 1,
    at: int = 1000,
    stderr: str = "",
    message: str = "",
    reports: dict[int, bytes] | None = None,
) -> RuntimeEvent:
    exit_ = WorkerExited(
        number, local_rank, 100 + local_rank, None if signum else code, signum, at, message, stderr
    )
    return RuntimeEvent(exit_, reports or {})


def stopped(number: int = 1) -> RuntimeEvent:
    return RuntimeEvent(Stopped(number))


class Driven:
    """Agent state driven by events; it keeps the commands."""

    def __init__(self, *events: Event, facts: Facts = FACTS) -> None:
        self.state = State(facts)
        self.now = 100.0
        self.commands: list[Command] = []
        for event in events:
            self.feed(event)

    def feed(self, event: Event, after: float = 0.1) -> list[Command]:
        """Feed one event `after` seconds later; return its commands."""
        self.now += after
        self.state, commands = step(self.state, event, self.now)
        self.commands.extend(commands)
        return list(commands)

    def only(self, kind: type[Kind], commands: Iterable[object] | None = None) -> list[Kind]:
        found = self.commands if commands is None else commands
        return [command for command in found if isinstance(command, kind)]


def ready() -> Driven:
    """Return a state with a launcher and a held port."""
    return Driven(hello(), PortReserved(4000))


def running(number: int = 1, **options: Any) -> Driven:
    """Return a state in which the round's workers run."""
    driven = ready()
    for event in (run(number, **options), PortReserved(4001), started(number)):
        driven.feed(event)
    return driven
