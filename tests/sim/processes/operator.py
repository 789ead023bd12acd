"""Simulated operator: bounds, expected size, replacements, keys of removed pods.

This module owns `bounds` if the plan has an operator. Like the real one it is slow,
level-triggered, and not needed for the training to continue.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elasticjob_operator.domain.plan.closing_checkpoint import COORDINATOR_SECONDS
from elasticjob_rendezvous.protocol.coordinator.checkpoint_gate import STOP_MARGIN_SECONDS
from elasticjob_rendezvous.protocol.kv import Delete, Put, Txn
from elasticjob_rendezvous.protocol.records.codec import decode, encode
from elasticjob_rendezvous.protocol.records.members import Outcome, OutcomeKind, Round, RoundState
from elasticjob_rendezvous.protocol.records.params import ClosingRequest, DrainRequest

if TYPE_CHECKING:
    from tests.sim.processes.pod import Pod
    from tests.sim.world import World

OPERATOR = "operator"


class Controller:
    """Operator of the one simulated job."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.bounds = world.plan.bounds
        self._dirty = True
        self._due = False
        self.stop_asked_at: float | None = None
        self.postponed_seconds = 0.0

    def start(self) -> None:
        if self.world.plan.operator:
            self._soon(0.2 * self.world.rng.random())

    # -- bounds ---------------------------------------------------------------------

    def change(self, **fields: Any) -> None:
        """Request other bounds, as the user or the operator would."""
        self.bounds = replace(self.bounds, **fields)
        self._dirty = True
        self._soon(0.01)

    def mark(self, pod: Pod, reason: str, preempted: bool = False) -> None:
        self.change(marks=(*self.bounds.marks, DrainRequest(pod.id, reason, preempted)))

    def stop(self, withdrawn_after: float) -> None:
        """Request a checkpoint and the end of the job; withdraw that later unless it is 0."""
        world = self.world
        self.stop_asked_at = world.now
        outcome = Outcome(OutcomeKind.STOPPED, "Suspended", reason="Suspended")
        self.change(closing=ClosingRequest(outcome, int(world.now * 1000)))
        if withdrawn_after:
            world.at(withdrawn_after, self._withdraw)
        else:
            world.at(self.stop_seconds, self._close)

    @property
    def stop_seconds(self) -> float:
        """Seconds after the request to stop at which the operator closes the job itself."""
        return max(self.bounds.leave_seconds - STOP_MARGIN_SECONDS, 0.0) + COORDINATOR_SECONDS

    def _withdraw(self) -> None:
        self.stop_asked_at = None
        self.change(closing=None)

    def _close(self) -> None:
        world = self.world
        stored = world.etcd.get(world.keys.round)
        if self._closed():
            return
        if stored is None and not world.alive():
            self.stop_asked_at = None  # etcd lost its data, and no member restores it
            return
        if not world.etcd_up or world.etcd_full or stored is None:
            self.postponed_seconds += 1.0
            world.at(1.0, self._close)
            return
        closing = self.bounds.closing
        assert closing is not None
        current = decode(Round, world.keys.round, stored.value)
        over = replace(current, state=RoundState.CLOSED, outcome=closing.outcome, save=None)
        world.note(OPERATOR, "closes", current.number)
        world.etcd.txn(Txn((), (Put(world.keys.round, encode(over)),)), OPERATOR)

    def pods_changed(self) -> None:
        """Adapt `expected` to the pods that can run."""
        if self.world.plan.operator:
            self._soon(0.05 + self.world.rng.random())

    def _soon(self, delay: float) -> None:
        if not self._due:
            self._due = True
            self.world.at(delay, self._reconcile)

    def _reconcile(self) -> None:
        self._due = False
        world = self.world
        if not world.plan.operator:
            return
        if not world.etcd_up or world.etcd_full:
            self._soon(1.0)
            return
        marked = {mark.member for mark in self.bounds.marks}
        coming = [pod for pod in world.alive() if not pod.leaving and pod.id not in marked]
        alive = {pod.id for pod in world.alive()}
        marks = tuple(mark for mark in self.bounds.marks if mark.member in alive)
        expected = max(len(coming), min(self.bounds.min_nodes, len(world.plan.arrivals)))
        bounds = replace(self.bounds, expected=expected, marks=marks)
        missing = world.etcd.get(world.keys.bounds) is None
        if bounds != self.bounds or self._dirty or missing:
            self.bounds = bounds
            self._dirty = False
            world.note(OPERATOR, "bounds", bounds)
            world.etcd.txn(Txn((), (Put(world.keys.bounds, encode(bounds)),)), OPERATOR)

    # -- pods -----------------------------------------------------------------------

    def gone(self, pod: Pod, forget: bool = True) -> None:
        """Handle a pod's death: delete its keys and create a replacement."""
        world = self.world
        if world.plan.operator:
            self.pods_changed()
            if forget:
                world.at(0.3 + 3.0 * world.rng.random(), self.forget, pod)
        if world.plan.replaces and not self._closed():
            world.at(0.1 + 3.0 * world.rng.random(), self._replace, pod)

    def exited(self, pod: Pod) -> None:
        self.pods_changed()

    def wiped(self) -> None:
        """Write the bounds again after etcd lost its data."""
        self._dirty = True
        if self.world.plan.operator:
            self._soon(0.2 + 2.0 * self.world.rng.random())

    def forget(self, pod: Pod) -> None:
        world = self.world
        if not world.etcd_up:
            world.at(1.0, self.forget, pod)
            return
        prefix = world.keys.sessions(pod.id)
        world.note(OPERATOR, "deletes the keys of", pod.name)
        world.etcd.txn(Txn((), (Delete(prefix, prefix=True),)), OPERATOR)

    def _replace(self, pod: Pod) -> None:
        if not self._closed() and not any(other.name == pod.name for other in self.world.alive()):
            self.world.add_pod(pod.name)

    def _closed(self) -> bool:
        return self.world.checker.closed_at is not None
