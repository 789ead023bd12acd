"""Checks of running workers: no two rounds side by side, no start before the round is final.

Stateless; the pods are checked whenever workers start and when an excuse ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticjob_rendezvous.protocol.directives import Directive, Finish, Refused, Run, Stop
from elasticjob_rendezvous.protocol.records.members import CauseKind
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.worker_group import Workers

if TYPE_CHECKING:
    from tests.sim.invariants.checker import Checker
    from tests.sim.processes.agent import Agent
    from tests.sim.processes.pod import Pod
    from tests.sim.world import World

PLANNED = (CauseKind.JOIN, CauseKind.LEAVE, CauseKind.PREEMPTION, CauseKind.SCALE_DOWN)


class Running:
    """Checks of everything but commits."""

    def __init__(self, world: World, checker: Checker) -> None:
        self.world = world
        self.checker = checker

    def starts(self, pod: Pod, roster: Roster) -> None:
        """Check a start of workers: final round, in its one roster, beside no other round's."""
        number = roster.number
        need, said = self.checker.need, f"{pod.name}: {roster}"
        need(number in self.checker.final_numbers, "starts on final", said)
        need(self.checker.sealed.get(number) == roster, "starts on final", said)
        agent = pod.agent
        holds = agent is not None and agent.engine.lease.holds(agent.clock())
        need(holds, "starts with a lease", said)
        need(roster.assignment(pod.id) is not None, "starts seated", said)
        self.checker.begun.add(number)
        self.world.note(pod.name, "starts workers of", number)
        for other in self.world.pods:
            if other is pod or not other.workers_alive or other.roster == roster:
                continue
            older_here = other.round > number and not self._excused(pod)
            if self.world.truth.robbed and self._excused(other):
                continue  # an etcd without its data counts from 1 again
            if older_here or not self._excused(other):
                self.checker.fail(
                    "no two rounds write",
                    f"{pod.name} starts round {number} while workers of round "
                    f"{other.round} are {other.phase} on {other.name}",
                )

    def promised(self, agent: Agent) -> None:
        """Check that an agent's lease never lasts longer than etcd's."""
        lease = agent.engine.lease
        expires = self.world.etcd.expires(lease.id)
        deadline = lease.deadline - agent.pod.clock_offset
        if expires is not None:
            late = deadline > expires + 1e-6
            self.checker.need(
                not late, "deadlines", f"{agent.pod.name}: {deadline} after {expires}"
            )

    def look_again(self, at: float) -> None:
        """Check, when an excuse ends, that nothing of an older round still runs."""
        self.world.at(max(0.0, at - self.world.now) + 0.001, self._sweep)

    def _sweep(self) -> None:
        running = [pod for pod in self.world.pods if pod.workers_alive]
        newest = max((pod.round for pod in running if pod.phase is not Workers.STOPPING), default=0)
        for pod in running:
            if pod.round < newest and not self._excused(pod):
                self.checker.fail(
                    "no two rounds write",
                    f"workers of round {pod.round} are still {pod.phase} on {pod.name} "
                    f"while round {newest} runs",
                )

    def _excused(self, pod: Pod) -> bool:
        """Return True for workers that cannot know or write: see `Faults` for each excuse."""
        if pod.frozen or self.world.now < pod.excused_until:
            return True
        return self.outlives_etcd(pod)

    def outlives_etcd(self, pod: Pod) -> bool:
        """Return True for a whole gang cut off from etcd, which trains on beside any newcomers."""
        if pod.roster is None:
            return False
        seats = {assignment.id for assignment in pod.roster.seats}
        gang = [other for other in self.world.pods if other.id in seats]
        network = self.world.network
        return all(
            other.agent is not None  # its links prove the gang whole, even after its workers failed
            and other.round == pod.round
            and not network.reaches_etcd(other.id)
            and network.joined(other.id, pod.id)
            for other in gang
        )

    def told(self, agent: Agent, directive: Directive) -> None:
        """Check a directive about workers as an agent takes it."""
        local = agent.engine.local
        if isinstance(directive, Run) and local.workers is Workers.NONE:
            again = local.round == directive.roster.number
            self.checker.need(not again, "a round starts once", f"{agent.pod.name}: {directive}")
        if isinstance(directive, Stop):
            stuck = directive.cause.kills and not directive.kill
            self.checker.need(not stuck, "stuck workers are killed", f"{directive}")
            gentle = directive.cause.kind in PLANNED and not directive.cause.kills
            early = gentle and directive.kill and not self._is_late(agent, directive)
            self.checker.need(not early, "planned stops have their grace", f"{directive}")

    def _is_late(self, agent: Agent, directive: Stop) -> bool:
        """Return True if the grace period is over, or if orphaned workers were found."""
        now, grace_seconds = self.world.now, self.world.plan.bounds.stop_grace_seconds
        if agent.pod.agents > 1 or self.checker.is_disturbed() or self.world.plan.rates:
            return True
        ended = self.checker.reopened_at.get(directive.round, now)
        return now - ended >= grace_seconds - 0.01

    def exits(self, pod: Pod, directive: Directive) -> None:
        closed = self.checker.closed
        if isinstance(directive, Finish) and closed is not None:
            same = directive.outcome == closed.outcome
            self.checker.need(same, "one outcome", f"{pod.name}: {directive}, but {closed}")
        if isinstance(directive, Refused):
            self.checker.fail("nobody is refused", f"{pod.name}: {directive.reason}")
