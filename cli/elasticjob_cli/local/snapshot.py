"""Snapshot of a job for display, gathered from its pods, its rendezvous and its logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elasticjob_agent.core.progress import WorkerProgress
from elasticjob_agent.progress import read_progress as read_progress_file
from elasticjob_cli.local.logs import WORKERS
from elasticjob_operator.core.observed import Observed, Pod
from elasticjob_operator.model import ElasticJob, RendezvousState


@dataclass(frozen=True, slots=True)
class NodeRow:
    """Row of one pod in the table of nodes."""

    pod: str
    ranks: str
    state: str
    round: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Displayed state of a job at one moment."""

    job: ElasticJob
    elapsed_seconds: float
    nodes: tuple[NodeRow, ...] = ()
    progress: Mapping[str, object] = field(default_factory=dict)


def node_rows(observed: Observed, ranks: Mapping[str, str]) -> tuple[NodeRow, ...]:
    """Return a row per pod in order of index; `ranks` are those of the current round."""
    members = {member.name: member for member in observed.rendezvous.members}
    rows = []
    for pod in sorted(observed.pods, key=lambda pod: (pod.index, pod.created_at)):
        member = members.get(pod.name) if pod.active else None
        if member is not None:
            state = member.state.value
            rows.append(NodeRow(pod.name, ranks.get(pod.name, ""), state, member.round))
        else:
            rows.append(NodeRow(pod.name, "", _state(pod, observed), 0))
    return tuple(rows)


def _state(pod: Pod, observed: Observed) -> str:
    """Return the displayed state of a pod without a member."""
    if pod.terminating:
        return "leaving"
    if not pod.active:
        return str(pod.phase)
    return "ending" if observed.rendezvous.state is RendezvousState.CLOSED else "starting"


def read_progress(logs: Path) -> Mapping[str, object]:
    """Return the newest progress report of all workers, preferably one with metrics."""
    told = [one for pod in logs.glob(f"*/{WORKERS}/*") for one in _told_by(pod)]
    if not told:
        return {}
    # Often only rank 0 reports metrics; the other workers' steps add nothing then.
    latest = max(told, key=lambda one: (bool(one.metrics), one.at_ms))
    metrics = {name: float(f"{value:.4g}") for name, value in latest.metrics.items()}
    return {"step": latest.step, **metrics}


def _told_by(pod: Path) -> list[WorkerProgress]:
    """Return the progress reports of a pod's newest round that has any.

    A round that has just begun has none yet; otherwise a deleted pod's report would look newest.
    """
    rounds = {int(path.name[6:]): path for path in pod.glob("round_*") if _is_round(path)}
    for number in sorted(rounds, reverse=True):
        found = [read_progress_file(path) for path in rounds[number].glob("*/progress")]
        if told := [one for one in found if one is not None and one.step >= 0]:
            return told
    return []


def _is_round(path: Path) -> bool:
    return path.name[6:].isascii() and path.name[6:].isdigit()
