"""Checkpoint requests to this node's workers before a planned stop, and their answers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elasticjob.layout import Request
from elasticjob_agent.core.commands import RequestCheckpoint
from elasticjob_agent.core.progress import WorkerProgress
from elasticjob_agent.core.state import CheckpointRequest, State, WorkerGroup
from elasticjob_rendezvous.protocol.coordinator.checkpoint_gate import ASK_SECONDS
from elasticjob_rendezvous.protocol.directives import Run
from elasticjob_rendezvous.protocol.records.members import Restore, Save


def request_checkpoint(state: State) -> tuple[State, tuple[RequestCheckpoint, ...]]:
    """Forward the rendezvous' save request to the running worker group, each request once."""
    group, save = state.group, _request(state)
    if group is None or group.empty or group.order is not None or save is None:
        return state, ()
    if group.request is not None and group.request.point == save.point:
        return state, ()
    first = CheckpointRequest(save.point, group.progress)
    request = first if group.request is None else replace(group.request, point=save.point)
    state = replace(state, group=replace(group, request=request))
    return state, (RequestCheckpoint(group.round, Request(save.point, save.seconds)),)


def record_answer(
    request: CheckpointRequest | None, progress: Mapping[int, WorkerProgress]
) -> CheckpointRequest | None:
    """Record the last save point passed: no worker passes another while a request is in place.

    Checkpoints up to that point do not count as the answer: the progress that was recorded with the
    request may be older than they are.
    """
    if request is None or request.passed >= 0:
        return request
    passed = max((worker.points for worker in progress.values()), default=0)
    return replace(request, passed=passed, before={**request.before, **progress})


def end_waiting_workers(state: State, now: float) -> State:
    """Count workers that saved and exited as done, unless their round ends in time.

    The round does not end if peers had finished before they reached the save point.
    """
    until, group = state.saved_workers_until, state.group
    if until is None or group is None or now < until:
        return state
    return replace(state, group=replace(group, request=None))


def waits_to_save(state: State, group: WorkerGroup, now: float) -> bool:
    """Return True if a leaving node's workers run on: to restore, or for a save request."""
    if state.leaving_at is None or not _may_wait(state, group):
        return False
    if restore(state, group) is Restore.PENDING:
        return True
    if not (wants_to_save(group) or wants_to_keep(group)):
        return False
    return _request(state) is not None or now < _asked_by(state.leaving_at, group)


def waits_to_restore(state: State, group: WorkerGroup) -> bool:
    """Return True if a leaving node's workers run on to restore, until the rendezvous stops them.

    The memory of this node may be the last with the newest snapshot. Once all nodes have restored
    it and made a step, the next planned stop saves it in another place.
    """
    return _may_wait(state, group) and restore(state, group) is Restore.PENDING


def is_unasked(state: State, number: int) -> bool:
    """Return True if that round's workers want to save before a planned stop but got no request."""
    group = state.group
    if group is None or group.round != number or group.empty or group.request is not None:
        return False
    return _precedes_stop(state, group) and wants_to_save(group) and _request(state) is None


def request_timeout_at(state: State) -> float | None:
    """Return the monotonic time at which workers stop waiting for a save request and are ended."""
    group = state.group
    if group is None or group.empty or group.order is not None or _request(state) is not None:
        return None
    if state.leaving_at is None or not waits_to_save(state, group, state.leaving_at):
        return None
    return None if waits_to_restore(state, group) else _asked_by(state.leaving_at, group)


def record_resume(state: State, now: float) -> State:
    """Record that all workers here have saved a snapshot, or could have, since their start.

    An agent that has taken them over, and the exit of a worker, may report it as well.
    """
    group = state.group
    if group is None or group.resumed_at is not None:
        return state
    resumed = sum(worker.resumed for worker in group.progress.values())
    if resumed == 0 or resumed != group.slots:
        return state
    return replace(state, group=replace(group, resumed_at=now))


def restore(state: State, group: WorkerGroup) -> Restore:
    """Return the progress of the running group in restoring the snapshots of earlier ones."""
    if group.resumed_at is not None:
        return Restore.DONE
    return Restore.PENDING if state.past_resumed else Restore.NONE


def wants_to_save(group: WorkerGroup) -> bool:
    """Return True if a script here wants to save before a planned stop."""
    return any(worker.saves for worker in group.progress.values())


def wants_to_keep(group: WorkerGroup) -> bool:
    """Return True if all workers here can keep their state in memory before a planned stop.

    A worker without a progress file would not stop at the agreed save point.
    """
    keeping = [worker for worker in group.progress.values() if worker.keeps]
    return len(keeping) == group.slots > 0


def completed(group: WorkerGroup) -> bool:
    """Return True if a worker here has reported the requested checkpoint."""
    request = group.request
    if request is None or request.point == 0:
        return False
    return any(
        _reports(request.point, request.before.get(rank), worker)
        for rank, worker in group.progress.items()
    )


def save_error(group: WorkerGroup) -> str:
    """Return the error of the requested checkpoint, once all workers here report that it failed.

    Workers that exited without such a report do not count. Empty if some have not failed.
    """
    request = group.request
    if request is None or request.point == 0:
        return ""
    ended = {found.exit.local_rank for found in group.exits}
    errors = []
    for rank, worker in group.progress.items():
        if worker.answer is not None and worker.answer.failed == request.point:
            errors.append(worker.answer.error)
        elif worker.is_asked and rank not in ended:
            return ""
    return errors[0] if errors else ""


def saved(group: WorkerGroup) -> bool:
    """Return True if all workers here have passed the agreed save point or exited.

    For a worker that reports its checkpoints this is False: it may still be writing this one, or
    have failed to write it.
    """
    request = group.request
    if request is None or request.point == 0 or save_error(group):
        return False
    ended = {found.exit.local_rank for found in group.exits}
    workers = [(rank, worker) for rank, worker in group.progress.items() if worker.is_asked]
    return all(
        worker.points > request.point
        and not (worker.reports or worker.keeps or request.before.get(rank, worker).checkpoints)
        for rank, worker in workers
        if rank not in ended
    )


def _reports(point: int, before: WorkerProgress | None, now: WorkerProgress) -> bool:
    """Return True if the worker has reported the checkpoint of this save point, not an earlier one.

    A periodic checkpoint may be reported between the request and the save point. A worker with an
    older library does not report the save point; it has passed the next one by then.
    """
    earlier = before or WorkerProgress()
    if now.points == 0:  # progress in text form has no save points
        return _has_saved(earlier, now)
    if now.answer is None:
        is_over = now.points > point
        return is_over and (_has_saved(earlier, now) or _had_saved(before, point))
    is_written = now.points > point and now.saved_ns != earlier.saved_ns
    keeps_beside_file = now.saves and now.keeps  # the file alone names a checkpoint
    return is_written or (now.answer.saved >= point and not keeps_beside_file)


def _has_saved(before: WorkerProgress, now: WorkerProgress) -> bool:
    more = now.checkpoints > before.checkpoints or now.saved_ns != before.saved_ns
    return more or now.checkpoint_step != before.checkpoint_step


def _had_saved(before: WorkerProgress | None, point: int) -> bool:
    """Return True if a worker had passed the point at the request, with all its steps saved.

    This occurs only if the agent has taken the workers over from another one.
    """
    if before is None or before.points <= point:
        return False
    return 0 <= before.step <= before.checkpoint_step


def _may_wait(state: State, group: WorkerGroup) -> bool:
    """Return True if workers of a leaving node need not be stopped at once."""
    return not state.is_urgent and _precedes_stop(state, group)


def _asked_by(leaving_at: float, group: WorkerGroup) -> float:
    """Return the time up to which workers of a leaving node may get a save request."""
    return max(leaving_at, group.resumed_at or leaving_at) + ASK_SECONDS


def _precedes_stop(state: State, group: WorkerGroup) -> bool:
    """Return True if a planned stop of the workers' round is preceded by a save request."""
    directive = state.directive
    if not isinstance(directive, Run) or group.round != directive.roster.number:
        return False
    return directive.precedes_stop


def _request(state: State) -> Save | None:
    """Return the rendezvous' save request for the worker group's round."""
    directive, group = state.directive, state.group
    if not isinstance(directive, Run) or group is None or group.round != directive.roster.number:
        return None
    return directive.save
