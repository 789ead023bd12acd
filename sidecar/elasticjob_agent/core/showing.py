"""Rate-limited training progress that a node reports to the rendezvous. Pure.

Each report is a write to etcd that the coordinator reads, so the interval grows with the number of
nodes. A new checkpoint is reported sooner: joining nodes may wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from elasticjob_agent.core.asking import answered
from elasticjob_agent.core.model import Crew, Shown, State, WorkersProgressed
from elasticjob_agent.core.progress import WorkerProgress
from elasticjob_rendezvous.core.directives import Run

STEP_SECONDS = 5.0
CHECKPOINT_SECONDS = 1.0
BUSY_METRIC = "busy_seconds"
"""Metric name for a script's own time per step, excluding waits for peers."""
BUSY_MOST_SECONDS = 86400.0
"""Maximum plausible step time; longer and infinite values are discarded."""
BUSY_MEMORY = 0.9
"""Weight of the previous average in the exponential smoothing of step times."""
SECONDS_A_SEAT = 0.05
"""Report interval per node of the job: all nodes together report at most 20 times a second."""


def progressed(state: State, event: WorkersProgressed, now: float) -> State:
    """Return the state after progress of the worker group's own round."""
    crew = state.crew
    if crew is None or crew.round != event.round:
        return state
    news = _told(event.progress) != _told(crew.progress)
    crew = replace(crew, busy_seconds=_busy(crew, event))
    crew = replace(crew, progress=event.progress, advanced_at=now if news else crew.advanced_at)
    if event.asked:
        crew = replace(crew, asked=answered(crew.asked, event.progress))
    return replace(state, crew=replace(crew, first_step_ms=_first_step_ms(crew, event, now)))


def _told(progress: Mapping[int, WorkerProgress]) -> dict[int, tuple[int, int, int, int]]:
    """Return the fields that advance with training; repeating them does not count as progress."""
    return {
        rank: (worker.step, worker.checkpoint_step, worker.checkpoints, worker.points)
        for rank, worker in progress.items()
        if worker.step >= 0 or worker.checkpoints or worker.points
    }


def _busy(crew: Crew, event: WorkersProgressed) -> dict[int, float]:
    """Return the smoothed step times, with the latest step of each worker included."""
    found = dict(crew.busy_seconds)
    for rank, worker in event.progress.items():
        said = worker.metrics.get(BUSY_METRIC, -1.0)
        before = crew.progress.get(rank)
        if 0 <= said <= BUSY_MOST_SECONDS and (before is None or worker.step != before.step):
            found[rank] = said + (found.get(rank, said) - said) * BUSY_MEMORY
    return found


def _first_step_ms(crew: Crew, event: WorkersProgressed, now: float) -> int:
    """Return the time from start to the slowest worker's first step; 0 until all have made one."""
    if crew.first_step_ms or not crew.started or len(event.progress) < crew.slots:
        return crew.first_step_ms
    firsts = [worker.first_step_ms for worker in event.progress.values()]
    known = [first for first in firsts if first is not None]
    if len(known) < len(firsts):
        return 0
    since_began = (now - crew.began) * 1000 - (event.utc_ms - max(known))
    return max(1, round(since_began) - crew.start_ms)


def showing(state: State, now: float) -> State:
    """Update the progress to report if a report is due."""
    due = shows_at(state)
    return state if due is None or now < due else replace(state, shown=_latest(state, now))


def shows_at(state: State) -> float | None:
    """Return the monotonic time of the next report; None if there is nothing new."""
    shown, latest = state.shown, _latest(state, 0.0)
    if latest is None:
        return None
    if shown is not None and replace(shown, at=0.0, busy_ms=latest.busy_ms) == latest:
        return None
    if shown is None or shown.round != latest.round:
        return 0.0
    saved = latest.checkpoint_step != shown.checkpoint_step
    return shown.at + max(
        CHECKPOINT_SECONDS if saved else STEP_SECONDS, SECONDS_A_SEAT * _seats(state)
    )


def _latest(state: State, now: float) -> Shown | None:
    crew = state.crew
    if crew is None or crew.empty or not crew.progress:
        return None
    workers = crew.progress.values()
    step = max(worker.step for worker in workers)
    saved = max(worker.checkpoint_step for worker in workers)
    busy = max(crew.busy_seconds.values(), default=0.0)
    return Shown(crew.round, step, saved, now, round(busy * 1000))


def _seats(state: State) -> int:
    return len(state.directive.roster.seats) if isinstance(state.directive, Run) else 1
