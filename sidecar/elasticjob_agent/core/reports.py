"""Reports of a node about itself to the rendezvous: its local state and its progress.

Each report of progress is a write to etcd that the coordinator reads, so the interval grows
with the number of nodes. A new checkpoint is reported sooner: joining nodes may wait for it.
No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elasticjob import layout
from elasticjob_agent.core.checkpoint_requests import (
    completed,
    record_answer,
    restore,
    save_error,
    saved,
    wants_to_keep,
    wants_to_save,
)
from elasticjob_agent.core.events import WorkersProgressed
from elasticjob_agent.core.progress import WorkerProgress
from elasticjob_agent.core.state import ReportedProgress, State, WorkerGroup
from elasticjob_rendezvous.protocol.directives import Run
from elasticjob_rendezvous.protocol.records.failures import ECHOES, Failure
from elasticjob_rendezvous.protocol.records.members import Restore, Snapshots, SnapshotTrouble
from elasticjob_rendezvous.protocol.worker_group import Local, Workers

STEP_SECONDS = 5.0
CHECKPOINT_SECONDS = 1.0
BUSY_METRIC = "busy_seconds"
"""Metric name for a script's own time per step, excluding waits for peers."""
MAX_BUSY_SECONDS = 86400.0
"""Maximum plausible step time; longer and infinite values are discarded."""
BUSY_MEMORY = 0.9
"""Weight of the previous average in the exponential smoothing of step times."""
SECONDS_PER_NODE = 0.05
"""Report interval per node of the job: all nodes together report at most 20 times a second."""


def record_progress(state: State, event: WorkersProgressed, now: float) -> State:
    """Return the state after progress of the worker group's own round."""
    group = state.group
    if group is None or group.round != event.round:
        return state
    advanced = _advancing_fields(event.progress) != _advancing_fields(group.progress)
    group = replace(group, busy_seconds=_busy(group, event))
    group = replace(
        group, progress=event.progress, advanced_at=now if advanced else group.advanced_at
    )
    if event.answers_request:
        group = replace(group, request=record_answer(group.request, event.progress))
    return replace(state, group=replace(group, first_step_ms=_first_step_ms(group, event, now)))


def _advancing_fields(
    progress: Mapping[int, WorkerProgress],
) -> dict[int, tuple[int, int, int, int]]:
    """Return the fields that advance with training; repeating them does not count as progress."""
    return {
        rank: (worker.step, worker.checkpoint_step, worker.checkpoints, worker.points)
        for rank, worker in progress.items()
        if worker.step >= 0 or worker.checkpoints or worker.points
    }


def _busy(group: WorkerGroup, event: WorkersProgressed) -> dict[int, float]:
    """Return the smoothed step times, with the latest step of each worker included."""
    found = dict(group.busy_seconds)
    for rank, worker in event.progress.items():
        busy = worker.metrics.get(BUSY_METRIC, -1.0)
        before = group.progress.get(rank)
        if 0 <= busy <= MAX_BUSY_SECONDS and (before is None or worker.step != before.step):
            found[rank] = busy + (found.get(rank, busy) - busy) * BUSY_MEMORY
    return found


def _first_step_ms(group: WorkerGroup, event: WorkersProgressed, now: float) -> int:
    """Return the time from start to the slowest worker's first step; 0 until all have made one."""
    if group.first_step_ms or not group.started or len(event.progress) < group.slots:
        return group.first_step_ms
    firsts = [worker.first_step_ms for worker in event.progress.values()]
    known = [first for first in firsts if first is not None]
    if len(known) < len(firsts):
        return 0
    since_began = (now - group.began) * 1000 - (event.utc_ms - max(known))
    return max(1, round(since_began) - group.start_ms)


def report_progress(state: State, now: float) -> State:
    """Update the progress to report if a report is due."""
    due = report_due_at(state)
    return (
        state if due is None or now < due else replace(state, reported_progress=_latest(state, now))
    )


def report_due_at(state: State) -> float | None:
    """Return the monotonic time of the next report; None if there is nothing new."""
    reported_progress, latest = state.reported_progress, _latest(state, 0.0)
    if latest is None:
        return None
    if (
        reported_progress is not None
        and replace(reported_progress, at=0.0, busy_ms=latest.busy_ms) == latest
    ):
        return None
    if reported_progress is None or reported_progress.round != latest.round:
        return 0.0
    if latest.stepped and not reported_progress.stepped:
        return 0.0  # the first step is reported at once, with the step that the round began with
    if state.group is not None and state.group.request is not None:
        return reported_progress.at  # workers that were asked to save make few further steps
    saved = latest.checkpoint_step != reported_progress.checkpoint_step
    return reported_progress.at + max(
        CHECKPOINT_SECONDS if saved else STEP_SECONDS, SECONDS_PER_NODE * _node_count(state)
    )


def _latest(state: State, now: float) -> ReportedProgress | None:
    group = state.group
    if group is None or group.empty or not group.progress:
        return None
    workers = group.progress.values()
    step = max(worker.step for worker in workers)
    saved = max(worker.checkpoint_step for worker in workers)
    busy = max(group.busy_seconds.values(), default=0.0)
    return ReportedProgress(
        round=group.round,
        step=step,
        checkpoint_step=saved,
        at=now,
        busy_ms=round(busy * 1000),
        snapshots=_snapshots(group),
        stepped=group.first_step_ms > 0,
    )


_TROUBLES = {
    layout.FITS: SnapshotTrouble.NONE,
    layout.NO_ROOM: SnapshotTrouble.NO_ROOM,
    layout.UNUSABLE: SnapshotTrouble.UNUSABLE,
}


def _snapshots(group: WorkerGroup) -> Snapshots | None:
    """Return the snapshots of a node: a version counts if every worker that reports has it."""
    snapshots = [
        found.snapshots for found in group.progress.values() if found.snapshots is not None
    ]
    if not snapshots:
        return None
    writes = [found for found in snapshots if found.stored >= 0]
    # A worker without room under the limit reports the needs of its node.
    full = [found.size for found in snapshots if found.trouble == layout.NO_ROOM and found.limit]
    trouble, error = max(layout.trouble_of(found.trouble) for found in snapshots)
    return Snapshots(
        step=min(found.step for found in snapshots),
        stored=min((found.stored for found in writes), default=-1),
        replicated=min(found.replicated for found in snapshots),
        replicas=max(found.replicas for found in snapshots),
        restored=max(found.restored for found in snapshots),
        bytes=min(max(full) if full else sum(found.size for found in snapshots), layout.MAX_STEP),
        limit=max(found.limit for found in snapshots),
        trouble=_TROUBLES.get(trouble, SnapshotTrouble.UNUSABLE),
        error=error,
        storage_error=max(layout.storage_trouble_of(found.trouble) for found in snapshots),
    )


def _lost(group: WorkerGroup | None) -> tuple[int, int, str]:
    """Return the repeated steps, their milliseconds and the reason, empty if it is unknown.

    They are known once all workers reached a step.
    """
    if group is None or not group.first_step_ms:
        return -1, 0, ""
    snapshots = [
        found.snapshots for found in group.progress.values() if found.snapshots is not None
    ]
    lost = ((found.lost, found.lost_ms, found.loss) for found in snapshots)
    steps, ms, loss = max(lost, default=(-1, 0, 0))
    return steps, ms, layout.loss_of(loss).reason if steps > 0 else ""


def _node_count(state: State) -> int:
    return len(state.directive.roster.seats) if isinstance(state.directive, Run) else 1


REASON_CHARACTERS = 200


def local_state(state: State) -> Local:
    """Return the complete local state, to be reported whenever it changes."""
    group = state.group
    training = group if state.busy else None
    reported_progress = state.reported_progress if training is not None else None
    if reported_progress is not None and reported_progress.round != state.round:
        reported_progress = None
    able = state.hello is not None and not state.gone and state.port > 0
    able = able and state.prepare_by is None
    lost_steps, lost_ms, lost_reason = _lost(group)
    ended_round, ended_step = state.ended_progress
    return Local(
        ready=able,
        workers=_workers(state),
        round=state.round,
        failure=_failure(group),
        done=group is not None and group.done,
        leaving=state.leaving,
        master_port=state.port,
        master_served=state.served,
        start_ms=0 if group is None else group.start_ms,
        first_step_ms=0 if group is None else group.first_step_ms,
        step=-1 if reported_progress is None else reported_progress.step,
        checkpoint_step=-1 if reported_progress is None else reported_progress.checkpoint_step,
        busy_ms=0 if reported_progress is None else reported_progress.busy_ms,
        saves=training is not None and wants_to_save(training),
        keeps=training is not None and wants_to_keep(training),
        restore=Restore.NONE if training is None else restore(state, training),
        passed=-1 if training is None or training.request is None else training.request.passed,
        saved=training is not None and saved(training),
        completed=training is not None and completed(training),
        save_error="" if training is None else save_error(training),
        cold=_cold(state),
        live_until=None if state.hello is None else state.hello.live_until,
        lost_steps=lost_steps,
        lost_ms=lost_ms,
        lost_reason=lost_reason,
        snapshots=None if reported_progress is None else reported_progress.snapshots,
        ended_round=ended_round,
        ended_step=ended_step,
        cut_off_round=state.cut_off_round,
    )


def _cold(state: State) -> str | None:
    """Return the cold-start reason; None without warm start or if another agent did the start."""
    group = state.group
    if group is None or not group.start_ms or not state.facts.warm_start:
        return None
    return group.cold_reason.strip().partition("\n")[0][:REASON_CHARACTERS]


def _failure(group: WorkerGroup | None) -> Failure | None:
    """Return the first failure; an aborted collective only once all workers here have exited.

    The cause of the abort may be another worker of this node that exits a moment later, and the
    rendezvous keeps the first failure it receives. The workers are being killed in the meantime.
    """
    if group is None or group.failure is None:
        return None
    echo = group.failure.kind in ECHOES
    return None if echo and not group.empty else group.failure


def _workers(state: State) -> Workers:
    group = state.group
    if group is None or not state.busy:
        return Workers.NONE
    if group.order is not None:
        return Workers.STOPPING
    return Workers.RUNNING if group.started else Workers.STARTING
