"""Checkpoints of one pod's script before a planned stop.

The script passes places at which it could save; a request holds it at the next one until the common
place is agreed on, and after its checkpoint it waits for the stop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticjob_rendezvous.protocol.records.members import Save
from elasticjob_rendezvous.protocol.worker_group import Workers

if TYPE_CHECKING:
    from tests.sim.processes.pod import Pod

STEP_SECONDS = 0.2
RESTORE_SECONDS = 1.0
"""Time from the start of workers that keep their state in memory to their first step, after the
first round."""


class Script:
    """Workers of one round on one pod.

    Attributes:
        saves: they want to save before a planned stop.
        places: number of places passed.
        told: the answer to a request, as `Local.passed`.
        saved: they saved at the common place.
        completed: they report that the checkpoint of all is complete.
        save_error: they report that their save failed.
    """

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self.saves = False
        self.places = 0
        self.told = -1
        self.saved = False
        self.completed = False
        self.save_error = ""
        self._request: Save | None = None
        self._since = 0.0

    def wanted_for(self, now: float) -> float:
        """Return the seconds since the workers first wanted to save."""
        return now - self._since if self.saves else 0.0

    def begins(self) -> None:
        """Start the script with its workers."""
        plan = self._pod.world.plan
        if plan.asks_to_save:
            restores = plan.keeps and self._pod.round > 1
            self._later(RESTORE_SECONDS if restores else 0.05, self._wants)

    def asked(self, save: Save | None) -> None:
        """Receive a request from the agent."""
        if save is None or not self._runs():
            return
        before, self._request = self._request, save
        world = self._pod.world
        if before is None:
            self._later(0.005 + 0.02 * world.rng.random(), self._answer)
        if save.point and not (before is not None and before.point):
            stuck = world.rng.random() < world.plan.stuck_share
            if not stuck:
                self._later(world.plan.save_seconds * (0.5 + world.rng.random()), self._save)

    def _runs(self) -> bool:
        return self._pod.script is self and self._pod.phase is Workers.RUNNING

    def _later(self, seconds: float, call: object) -> None:
        self._pod.world.at(seconds, self._do, call)

    def _do(self, call: object) -> None:
        """Run a worker's action, once its machine is no longer frozen."""
        if self._pod.frozen:
            self._later(0.3, call)
        elif self._runs():
            call()  # type: ignore[operator]

    def _wants(self) -> None:
        self.saves, self._since = True, self._pod.world.now
        self._pod.has_kept = self._pod.world.plan.keeps
        self._pod.changed()

    def _answer(self) -> None:
        """Answer the request: no further place is passed from now on."""
        steps = (self._pod.world.now - self._since) / STEP_SECONDS if self.saves else 0.0
        self.places = int(steps + 3.0 * self._pod.world.rng.random())
        self.told = self.places
        self._pod.changed()

    def _save(self) -> None:
        if self._request is None or self.told < 0:
            return
        if self._pod.world.plan.saves_fail:
            self.save_error = "rank 0: /checkpoints: No space left on device"
            self._pod.changed()
            return
        self._pod.world.note(self._pod.name, "saved at", self._request.point)
        self.saved = True
        self._pod.world.gangs.saved(self._pod)
        self._pod.changed()
