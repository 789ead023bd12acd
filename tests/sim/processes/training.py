"""Simulated training: collectives that break together, and scripts that finish together.

This module owns the gang of each round: the pods whose workers run in it and the state of its
collectives. If a peer disappears, the workers soon fail with an aborted collective, or hang.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticjob_rendezvous.protocol.records.failures import FailureClass
from elasticjob_rendezvous.protocol.worker_group import Workers

if TYPE_CHECKING:
    from tests.sim.processes.pod import Pod
    from tests.sim.world import World

CUT_NOTICED_SECONDS = 0.3


@dataclass(slots=True)
class Gang:
    """Workers of one round."""

    number: int
    seats: frozenset[str]
    running: dict[str, Pod] = field(default_factory=dict)
    finishing: bool = False
    broken: bool = False


class Gangs:
    """Gangs of all rounds."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._gangs: dict[int, Gang] = {}

    def gang(self, number: int) -> Gang | None:
        return self._gangs.get(number)

    def forget(self, number: int) -> None:
        """Forget a number that was sealed anew after a wipe, with its broken collectives."""
        self._gangs.pop(number, None)
        self.world.truth.aborts.pop(number, None)

    def running(self, pod: Pod) -> None:
        """Record that the pod's workers of its round are running."""
        assert pod.roster is not None
        gang = self._gangs.get(pod.round)
        if gang is None:
            seats = frozenset(assignment.id for assignment in pod.roster.seats)
            gang = self._gangs[pod.round] = Gang(pod.round, seats)
        gang.running[pod.id] = pod
        if gang.broken:
            self._abort(pod)
        elif self._cut(gang):
            self.world.at(CUT_NOTICED_SECONDS, self._check_cut, gang)
        elif len(gang.running) == len(gang.seats):
            self._train(gang)

    def _train(self, gang: Gang) -> None:
        """Start the training of a complete gang: steps, checkpoints, and the end of the script."""
        plan = self.world.plan
        if plan.work_seconds is not None:
            self.world.at(plan.work_seconds, self._finish, gang)
        if plan.checkpoint_seconds is not None:
            self.world.at(plan.checkpoint_seconds, self._save, gang)
        if plan.crash_seconds is not None:
            self.world.at(plan.crash_seconds, self._crash, gang)

    def saved(self, pod: Pod) -> None:
        """Record one node's save; the last one may report the checkpoint as complete."""
        gang = self._gangs.get(pod.round)
        if gang is not None and all(one.script.saved for one in gang.running.values()):
            pod.script.completed = self.world.rng.random() < 0.5

    def _save(self, gang: Gang) -> None:
        """Save a checkpoint on one pod for all; a frozen machine delays it for the whole gang."""
        if gang.broken or gang.finishing or len(gang.running) != len(gang.seats):
            return
        assert self.world.plan.checkpoint_seconds is not None
        self.world.at(self.world.plan.checkpoint_seconds, self._save, gang)
        if not any(pod.frozen for pod in gang.running.values()):
            gang.running[min(gang.running)].saved()

    def stopped(self, pod: Pod) -> None:
        """Handle the failure, end or stop of the pod's workers: peers lose their collectives."""
        gang = self._gangs.get(pod.round)
        if gang is None:
            if pod.roster is None:
                return
            seats = frozenset(assignment.id for assignment in pod.roster.seats)
            gang = self._gangs[pod.round] = Gang(pod.round, seats)
        gang.running.pop(pod.id, None)
        if not pod.done:
            self._break(gang)

    def network_changed(self) -> None:
        for gang in self._gangs.values():
            if not gang.broken and self._cut(gang):
                self.world.at(CUT_NOTICED_SECONDS, self._check_cut, gang)

    def _cut(self, gang: Gang) -> bool:
        pods = list(gang.running.values())
        return any(not self.world.network.joined(pods[0].id, pod.id) for pod in pods[1:])

    def _check_cut(self, gang: Gang) -> None:
        if not gang.broken and self._cut(gang):
            self.world.truth.blip(gang.number)
            self._break(gang)

    def _break(self, gang: Gang) -> None:
        if gang.broken or gang.finishing:
            return
        gang.broken = True
        for pod in list(gang.running.values()):
            self._abort(pod)

    def _abort(self, pod: Pod) -> None:
        rng = self.world.rng
        if rng.random() < self.world.plan.hang_share:
            pod.hung = True
            return
        self.world.at(0.005 + 2.0 * rng.random() ** 2, self._aborted, pod, pod.round)

    def _aborted(self, pod: Pod, number: int) -> None:
        if pod.round != number or pod.phase is not Workers.RUNNING:
            return
        if pod.frozen:
            self.world.at(0.5, self._aborted, pod, number)
            return
        # A time-out is judged like an abort: every other round ends with one.
        late = number % 2 == 0
        kind = FailureClass.COLLECTIVE_TIMEOUT if late else FailureClass.PEER_ABORT
        pod.fail_workers(kind)

    # -- a bug in the script --------------------------------------------------------

    def _crash(self, gang: Gang) -> None:
        """Fail the script on one rank, where it always fails."""
        if self.world.calm or gang.broken or gang.finishing or not gang.running:
            return
        pod = self.world.rng.choice(list(gang.running.values()))
        steps = {"none": None, "same": 100, "further": 100 + gang.number}
        pod.fail_workers(FailureClass.USER_ERROR, steps[self.world.plan.crash_steps])

    # -- finishing ------------------------------------------------------------------

    def _finish(self, gang: Gang) -> None:
        """Finish the script on every rank; the ranks end one after the other."""
        if gang.broken or len(gang.running) != len(gang.seats):
            return
        if any(pod.frozen for pod in gang.running.values()):
            self.world.at(0.5, self._finish, gang)
            return
        gang.finishing = True
        rng, plan = self.world.rng, self.world.plan
        for pod in list(gang.running.values()):
            wait = plan.finish_skew_seconds * rng.random()
            if rng.random() < plan.late_error_share:
                self.world.at(wait, self._late_error, pod, gang.number)
            else:
                self.world.at(wait, pod.finish_workers, gang.number)

    def _late_error(self, pod: Pod, number: int) -> None:
        if pod.round == number and pod.phase is Workers.RUNNING:
            pod.fail_workers(FailureClass.USER_ERROR)
