"""Simulated pod: its launcher, its workers and its agent, modelled on the real ones.

This module owns the workers. They follow the agent's directive with the delays of real processes,
outlive the agent, and die with the pod.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from elasticjob_rendezvous.protocol.config import Identity
from elasticjob_rendezvous.protocol.directives import Directive, Finish, Left, Refused, Run, Stop
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.members import Restore
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.worker_group import Local, Workers
from tests.sim.processes.agent import UTC_START_MS, Agent
from tests.sim.processes.checkpoint_script import Script

if TYPE_CHECKING:
    from tests.sim.world import World

BEAT_SECONDS = 0.5
ALIVE = frozenset({Workers.STARTING, Workers.RUNNING, Workers.STOPPING})


class Pod:
    """Pod and its processes.

    Attributes:
        alive: its processes exist (a dead pod never comes back; its name may).
        powered: its machine answers; a machine without power is silent.
        frozen: the whole machine is suspended, workers included.
        phase, round, failure, done: state of the workers, as in `worker_group.Local`.
        hung: its workers wait forever in a broken collective.
        frozen_until: end of the excuse that freezing gives to workers that should have stopped.
        live_until: the workers' deadline, as known to their launcher; None before any.
        cut_off: last round whose workers ended at that deadline without an order.
    """

    def __init__(self, world: World, identity: Identity) -> None:
        self.world = world
        self.identity = identity
        self.id = identity.id
        self.name = identity.name
        self.alive = True
        self.powered = True
        self.frozen = False
        self.live_until: float | None = None
        self.agent_heard = 0.0
        self._watched = False
        self.ready = False
        self.leaving = ""
        self.leaving_since = 0.0
        self.has_kept = False
        self.agent: Agent | None = None
        self.agents = 0
        self.agent_since = 0.0
        self.phase = Workers.NONE
        self.round = 0
        self.roster: Roster | None = None
        self.failure: Failure | None = None
        self.done = False
        self.hung = False
        self.start_ms = 0
        self.checkpoint_step = -1
        self.started_at = 0.0
        self.script = Script(self)
        self.master_port = 0
        self.excused_until = 0.0
        self.outcome: Finish | None = None
        self.ignores_sigterm = world.rng.random() < world.plan.stubborn
        self.clock_offset = float(world.rng.randrange(1, 100_000))
        self.utc_skew_ms = world.rng.randrange(-2000, 2000)
        self._stop_token = 0
        self._killing = False
        self._given_up = 0
        self._found_deadline: float | None = None
        self.cut_off = 0

    @property
    def workers_alive(self) -> bool:
        return self.alive and self.phase in ALIVE

    @property
    def takes_over(self) -> bool:
        """True if its agent is gone, or returned so recently that it may not be registered."""
        if self.agent is None:
            return True
        return self.agents > 1 and self.world.now - self.agent_since < 5.0

    @property
    def restore(self) -> Restore:
        """State of its workers with respect to states that earlier ones kept in memory."""
        if self.phase is Workers.NONE or not self.has_kept:
            return Restore.NONE
        return Restore.DONE if self.script.saves else Restore.PENDING

    def local(self) -> Local:
        return Local(
            ready=self.ready,
            workers=self.phase,
            round=self.round,
            failure=self.failure,
            done=self.done,
            leaving=self.leaving,
            master_port=self.master_port,
            start_ms=self.start_ms,
            checkpoint_step=self.checkpoint_step if self.phase is not Workers.NONE else -1,
            saves=self.script.saves and not self.world.plan.keeps,
            keeps=self.script.saves and self.world.plan.keeps,
            restore=self.restore,
            passed=self.script.told,
            saved=self.script.saved,
            completed=self.script.completed,
            save_error=self.script.save_error,
            live_until=self._found_deadline,
            cut_off_round=0 if self.workers_alive and self.cut_off == self.round else self.cut_off,
        )

    def changed(self) -> None:
        """Notify the agent of a change of the pod's state."""
        if self.agent is not None:
            self.world.at(0.0002, self._report, self.agent)

    def _report(self, agent: Agent) -> None:
        if agent is self.agent and not agent.exited:
            agent.report()

    # -- life -----------------------------------------------------------------------

    def boot(self) -> None:
        """Start the pod's agent; a moment later its launcher connects."""
        self.start_agent()
        self.world.at(0.01 + 0.5 * self.world.rng.random(), self._hello)

    def _hello(self) -> None:
        self.ready = True
        self.master_port = self.world.next_port()
        self.changed()

    def start_agent(self) -> None:
        if not self.alive or self.agent is not None:
            return
        if self.frozen:
            self.world.at(0.5, self.start_agent)
            return
        self.agents += 1
        self._given_up = 0
        self.agent_since = self.world.now
        found = self.live_until if self.workers_alive else None
        self._found_deadline = None if found is None else found + self.clock_offset
        self.agent = self.world.new_agent(self)
        self.agent.start()
        self.agent_heard = self.world.now
        self.world.at(BEAT_SECONDS * self.world.rng.random(), self._beat, self.agent)

    def kill_agent(self) -> None:
        """Kill the agent alone; the launcher ends the workers if no new agent comes."""
        agent, self.agent = self.agent, None
        if agent is None:
            return
        agent.kill()
        self.world.at(self.world.plan.orphan_seconds, self._orphaned, self.agents)

    def _orphaned(self, agents: int) -> None:
        if self.alive and self.agent is None and self.agents == agents and self.workers_alive:
            self._workers_gone(None)

    def _beat(self, agent: Agent) -> None:
        """Send the workers' deadline to the launcher."""
        if agent is not self.agent or agent.exited:
            return
        if not agent.paused and not self.frozen:
            self.hear(agent)
        self.world.at(BEAT_SECONDS, self._beat, agent)

    def hear(self, agent: Agent) -> None:
        """Receive the workers' deadline in the launcher."""
        self.agent_heard = self.world.now
        self._move_deadline(agent.engine.live_until - self.clock_offset)

    def permit(self, number: int, until: float) -> None:
        """Extend the life of workers without an agent, while the coordinator keeps their lease."""
        gone = self.agent is None or self.agent.silent or not self.agent.engine.session
        if gone and self.alive and not self.frozen and number == self.round:
            latest = self.agent_heard + self.world.plan.orphan_seconds
            self._move_deadline(min(until, latest))

    def _move_deadline(self, at: float) -> None:
        if self.live_until is None or at > self.live_until:
            self.live_until = at
        self._watch_deadline()

    def _watch_deadline(self) -> None:
        if not self._watched and self.live_until is not None and self.live_until < math.inf:
            self._watched = True
            self.world.at(max(0.0, self.live_until - self.world.now), self._look_at_deadline)

    def _look_at_deadline(self) -> None:
        self._watched = False
        assert self.live_until is not None
        if self.frozen and self.alive:
            self._watched = True
            self.world.at(0.01, self._look_at_deadline)
        elif self.world.now + 1e-6 < self.live_until:
            self._watch_deadline()
        elif self.workers_alive:
            self.world.note(self.name, "deadline", self.round)
            if self.phase is not Workers.STOPPING:
                self.cut_off = self.round
            self._stop(kill=True, grace=0.0)

    def told_absent(self, newest: int) -> None:
        """Record that a prober learned from the launcher of a missing or hanging agent."""
        self._given_up = max(self._given_up, newest - 1 if self.workers_alive else newest)

    def end_orphans(self) -> None:
        """End the orphaned workers after a probe with a newer round."""
        self._stop(kill=True, grace=0.0)

    def die(self, silent: bool = False) -> None:
        """End agent, launcher and workers at once; `silent`: the machine lost power."""
        if not self.alive:
            return
        self.powered = not silent
        self.alive = False
        agent, self.agent = self.agent, None
        if agent is not None:
            agent.kill()
        if self.phase is not Workers.NONE:
            self._workers_gone(None)
        self.world.truth.gone(self)

    def leave(self, reason: str) -> None:
        """Announce the pod's end: preStop, SIGTERM or the operator's mark."""
        if self.alive and not self.leaving:
            self.leaving, self.leaving_since = reason, self.world.now
            self.world.truth.leaves(self)
            self.changed()

    # -- execution of directives ----------------------------------------------------

    def follow(self, directive: Directive) -> None:
        match directive:
            case Run(roster=roster, save=save):
                self._run(roster)
                self.script.asked(save)
            case Stop(round=round, kill=kill, grace_seconds=grace):
                if self.phase is Workers.NONE and self.round < round:
                    self._never_started(round)
                elif self.round <= round:
                    self._stop(kill, grace)
            case Left() | Refused():
                self._stop(kill=True, grace=0.0)
                self._exit_when_stopped(directive)
            case Finish(grace_seconds=grace):
                self._stop(kill=False, grace=grace)
                self._exit_when_stopped(directive)

    def _never_started(self, round: int) -> None:
        """Record a round that was over before its workers came up."""
        self.round, self.roster = round, None
        self.failure, self.done = None, False
        self.changed()

    def _exit_when_stopped(self, directive: Directive) -> None:
        if self.phase is not Workers.NONE or not self.alive:
            return
        self.world.note(self.name, "exits", directive)
        if isinstance(directive, Finish):
            self.outcome = directive
        self.world.running.exits(self, directive)
        self.world.at(0.0, self._exit)

    def _exit(self) -> None:
        if self.alive:
            self.alive = False
            agent, self.agent = self.agent, None
            if agent is not None:
                agent.kill()
            self.world.controller.exited(self)

    def _run(self, roster: Roster) -> None:
        if self.round == roster.number:
            return
        if self.phase is not Workers.NONE:
            self._stop(kill=True, grace=0.0)
            return
        if roster.number <= self._given_up:
            self._never_started(roster.number)
            return
        self.round, self.roster = roster.number, roster
        self.failure, self.done, self.hung = None, False, False
        self.checkpoint_step = -1
        self.script = Script(self)
        self.phase = Workers.STARTING
        assert self.agent is not None
        self.hear(self.agent)
        self._stop_token += 1
        self.world.running.starts(self, roster)
        delay = self.world.plan.start_seconds * (0.2 + self.world.rng.random())
        self.start_ms = int(delay * 1000)
        self.world.at(delay, self._started, self._stop_token)
        self.changed()

    def _started(self, token: int) -> None:
        if token != self._stop_token or self.phase is not Workers.STARTING:
            return
        if self.frozen:
            self.world.at(0.5, self._started, token)
            return
        self.phase = Workers.RUNNING
        self.started_at = self.world.now
        self.script.begins()
        self.master_port = self.world.next_port()
        self.changed()
        self.world.gangs.running(self)

    def _stop(self, kill: bool, grace: float) -> None:
        if self.phase not in ALIVE or (self._killing and self.phase is Workers.STOPPING):
            return
        if self.phase is Workers.STOPPING and not kill:
            return
        self.phase = Workers.STOPPING
        self._killing = kill
        self._stop_token += 1
        rng = self.world.rng
        if kill:
            wait = 0.001 + 0.019 * rng.random()
        else:
            stubborn = self.ignores_sigterm or self.hung
            wait = grace + 0.01 if stubborn else min(grace, 0.01 + grace * rng.random() ** 3)
        self.world.at(wait, self._stopped, self._stop_token)
        self.changed()
        self.world.gangs.stopped(self)

    def _stopped(self, token: int) -> None:
        if token != self._stop_token or self.phase is not Workers.STOPPING:
            return
        if self.frozen:
            self.world.at(0.01, self._stopped, token)
            return
        self._workers_gone(self.failure)

    def saved(self) -> None:
        """Record a completed checkpoint of the local workers."""
        self.checkpoint_step += 1
        self.world.note(self.name, "saved", self.checkpoint_step)
        self.changed()

    # -- events of the workers ------------------------------------------------------

    def fail_workers(self, kind: FailureClass, step: int | None = None) -> None:
        """Fail one worker, at this step; the agent ends the others of this pod."""
        if self.phase not in (Workers.STARTING, Workers.RUNNING) or self.roster is None:
            return
        if self.frozen:
            return
        rng = self.world.rng
        local_rank = rng.randrange(self.identity.slots)
        ran = self.world.now - self.started_at if self.phase is Workers.RUNNING else 0.0
        told = self._failure(self.roster, local_rank, kind)
        self.failure = replace(told, step=step, ran_ms=int(ran * 1000))
        self.world.truth.failed(self, kind)
        self.world.note(self.name, "worker failed", kind)
        if self.identity.slots > 1 and rng.random() < 0.7:
            self.phase = Workers.STOPPING
            self._killing = True
            self._stop_token += 1
            self.world.at(0.001 + 0.02 * rng.random(), self._stopped, self._stop_token)
            self.changed()
        else:
            self._workers_gone(self.failure)
        self.world.gangs.stopped(self)

    def _failure(self, roster: Roster, local_rank: int, kind: FailureClass) -> Failure:
        assignment = roster.assignment(self.id)
        rank = (assignment.base_rank if assignment is not None else 0) + local_rank
        at_ms = UTC_START_MS + int(self.world.now * 1000) + self.utc_skew_ms
        return Failure(self.round, self.id, self.name, rank, local_rank, kind, at_ms, exit_code=1)

    def finish_workers(self, number: int) -> None:
        """End every worker of the pod with success."""
        if self.phase is not Workers.RUNNING or self.round != number:
            return
        if self.frozen:
            self.world.at(0.5, self.finish_workers, number)
            return
        self.done = True
        self.world.truth.done(self)
        self._workers_gone(None)

    def _workers_gone(self, failure: Failure | None) -> None:
        was = self.phase
        self.phase = Workers.NONE
        self.failure = failure
        self._killing = False
        self._stop_token += 1
        self.master_port = self.world.next_port()
        if was in ALIVE:
            self.world.gangs.stopped(self)
        self.changed()
