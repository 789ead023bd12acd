"""Checks of checkpoints before a planned end, based on the scripts' actual saves. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticjob_rendezvous.protocol.coordinator.checkpoint_gate import save_seconds
from elasticjob_rendezvous.protocol.records.closing_checkpoint import SaveResult
from elasticjob_rendezvous.protocol.records.members import (
    CauseKind,
    OutcomeKind,
    Restore,
    Round,
    RoundState,
)
from elasticjob_rendezvous.protocol.worker_group import Workers

if TYPE_CHECKING:
    from tests.sim.invariants.checker import Checker
    from tests.sim.processes.pod import Pod

PLANNED = (CauseKind.JOIN, CauseKind.LEAVE, CauseKind.PREEMPTION, CauseKind.SCALE_DOWN)
SETTLED_SECONDS = 1.0
"""Training time after which a script's wish for a checkpoint is certainly known."""
SLACK_SECONDS = 0.1
STOP_SLACK_SECONDS = 1.0
"""Time for the write of the request and for the operator's own close."""


def check(checker: Checker, before: Round | None, after: Round) -> None:
    """Check one write of the round."""
    if after.save is not None:
        final = after.state is RoundState.FINAL
        checker.need(final, "saving", f"a round that is {after.state} asks for a checkpoint")
    if before is None or before.number > after.number:
        return
    same = before.number == after.number and after.state is RoundState.FINAL
    if same and before.save != after.save:
        _check_request(checker, before, after)
    elif before.state is RoundState.FINAL and after.state is RoundState.JOINABLE:
        _ended(checker, before, after)
    elif before.state is not RoundState.CLOSED and after.state is RoundState.CLOSED:
        _closed(checker, before, after)


def _gang(checker: Checker, number: int) -> list[Pod]:
    """Return the pods of a round whose workers run."""
    seats = {assignment.id for assignment in checker.sealed[number].seats}
    pods = [pod for pod in checker.world.pods if pod.id in seats]
    return [p for p in pods if p.alive and p.round == number and p.phase is Workers.RUNNING]


def _can_report(pod: Pod) -> bool:
    """Return True if its agent could report its workers' wishes all the time."""
    agent = pod.agent
    return agent is not None and not (agent.paused or pod.frozen or pod.takes_over)


def _check_request(checker: Checker, before: Round, after: Round) -> None:
    """Check a request: first a question; then, once, a place that no rank has passed."""
    gang, save = _gang(checker, after.number), after.save
    if save is None or before.save is None:
        checker.need(save is not None, "saving", "a request was taken back")
        checker.need(save is None or save.point == 0, "saving", f"{save} before it was asked")
        checker.save_asked_at = checker.world.now
        return
    checker.need(before.save.point == 0, "saving", f"{before.save} became {save}")
    passed = {pod.name: pod.script.places for pod in gang}
    ahead = all(save.point > places for places in passed.values())
    checker.need(ahead, "saving", f"place {save.point} was passed: {passed}")
    silent = [pod.name for pod in gang if pod.script.told < 0]
    checker.need(not silent, "saving", f"place {save.point} is agreed on without {silent}")


def _closed(checker: Checker, before: Round, after: Round) -> None:
    """Check that a stop of the job ends in time, and after the checkpoint where it can."""
    world, outcome = checker.world, after.outcome
    asked_at = world.controller.stop_asked_at
    if asked_at is None or outcome is None or outcome.kind is not OutcomeKind.STOPPED:
        return
    most = world.controller.stop_seconds + world.controller.postponed_seconds
    late = world.now - asked_at > most + STOP_SLACK_SECONDS
    checker.need(not late or checker.in_trouble(), "stops end", f"asked for at {asked_at}")
    report = outcome.save
    if report is None or before.state is not RoundState.FINAL:
        return
    gang, seats = _gang(checker, before.number), checker.sealed[before.number].seats
    saved = [pod for pod in gang if pod.script.saved]
    is_kept = world.plan.keeps  # in memory, which the job does not outlive
    truly = report.result is not SaveResult.SAVED or (len(saved) == len(gang) and not is_kept)
    checker.need(truly or checker.in_trouble(), "saving", f"{report}, but {saved} saved")
    # As many as wanted for another planned end, and none that was lost meanwhile.
    if len(gang) < len(seats) or any(pod.agent is None for pod in gang) or checker.in_trouble():
        return
    failed = all(pod.script.save_error for pod in gang)
    if report.result is SaveResult.TIMED_OUT and not failed:
        assert before.save is not None
        waited = world.now - checker.save_asked_at >= before.save.seconds - SLACK_SECONDS
        checker.need(waited, "saving", f"closed before the checkpoint: {report}")
    if report.result is SaveResult.NOT_SUPPORTED:
        now = world.now
        wanted = all(
            pod.script.wanted_for(now) > SETTLED_SECONDS and _can_report(pod) for pod in gang
        )
        is_excused = is_kept or bool(world.plan.rates)
        checker.need(not wanted or is_excused, "saving", f"nobody was asked: {report}")


def _restored(checker: Checker, gang: list[Pod], seconds: float, after: Round) -> None:
    """Check that no memory leaves before the workers of all nodes have restored its state."""
    most = seconds - SETTLED_SECONDS
    early = [
        pod.name
        for pod in gang
        if pod.leaving
        and pod.restore is Restore.PENDING
        and checker.world.now - pod.leaving_since < most
        and _can_report(pod)
    ]
    checker.need(not early, "saving", f"{early} had not restored: {after.cause}")


def _ended(checker: Checker, before: Round, after: Round) -> None:
    """Check that a planned end comes after the checkpoint, or after its time limit."""
    if after.cause.kind not in PLANNED or after.cause.kills or checker.in_trouble():
        return
    seats = checker.sealed[before.number].seats
    gang = _gang(checker, before.number)
    if len(gang) < len(seats) or any(pod.agent is None for pod in gang):
        return  # one has ended meanwhile, or its checkpoint is no longer reported
    now = checker.world.now
    if before.save is None:
        seconds = min(save_seconds(after.cause, bounds) for bounds in checker.recent_bounds())
        wanted = all(
            pod.script.wanted_for(now) > SETTLED_SECONDS and _can_report(pod) for pod in gang
        )
        wanted = wanted and not checker.world.plan.rates  # a lost request reports it late
        # Nobody remembers the state of a gang that leaves as a whole.
        leaves = all(pod.leaving or pod.name in after.cause.members for pod in gang)
        wanted = wanted and not (checker.world.plan.keeps and leaves)
        checker.need(not wanted or seconds <= 0, "saving", f"nobody was asked: {after.cause}")
        if not leaves and not checker.world.plan.rates:
            _restored(checker, gang, seconds, after)
        return
    saved = all(pod.script.saved or pod.script.save_error for pod in gang)
    waited = now - checker.save_asked_at >= before.save.seconds - SLACK_SECONDS
    checker.need(saved or waited, "saving", f"stopped before the checkpoint: {after.cause}")
