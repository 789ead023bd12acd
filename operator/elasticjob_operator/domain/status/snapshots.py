"""Snapshots of a job as its workers report them: restorable step, losses, memory."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator, Sequence
from datetime import datetime

from elasticjob_operator.domain.observed.state import RendezvousView
from elasticjob_operator.domain.plan.lifecycle import FINISHED, STOPPING
from elasticjob_operator.domain.status.failures import is_new_run
from elasticjob_operator.domain.status.goodput import is_carried_over, with_reached, with_rounds
from elasticjob_operator.domain.status.readiness import Finding
from elasticjob_operator.domain.status.rounds import seconds_text
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.status import RoundStatus, SnapshotsStatus, Status
from elasticjob_operator.model.types import ConditionStatus, ConditionType, Phase, ReplicaState
from elasticjob_rendezvous.protocol.records.members import Member, Snapshots, SnapshotTrouble
from elasticjob_rendezvous.protocol.records.roster import natural_order

MEMORY_LIMIT_TOO_SMALL = "MemoryLimitTooSmall"
SHARED_MEMORY_FULL = "SharedMemoryFull"
MEMORY_UNUSABLE = "MemoryUnusable"
STORAGE_SILENT = "StorageNotAnswering"
STORAGE_UNUSABLE = "StorageUnusable"
_VERSIONS = 2
"""Number of snapshots that a node holds: one of them is always complete."""


def snapshots_status(
    view: RendezvousView,
    rounds: Sequence[RoundStatus],
    run: Status,
    phase: Phase,
    now: datetime,
    program: str,
) -> SnapshotsStatus | None:
    """Return the status of the snapshots; None for a job without any.

    `run` is the status of this run, and `program` the digest of the job's program. Between rounds
    the last known steps stay. Before the first report of a run there are no totals.
    """
    before = run.snapshots
    reports = [snapshots for _, snapshots in _reports(view)]
    if not view.readable or run.phase in FINISHED or (before is None and not reports):
        return before
    if before is not None and not reports and is_carried_over(before):
        return before
    counted = before or SnapshotsStatus()
    if run.phase not in STOPPING or phase not in STOPPING:
        counted = with_rounds(counted, rounds, run.rounds, view, now)
        counted = with_reached(counted, view, program)
    if not reports or phase in FINISHED:
        return counted
    memory, stored = (
        min(report.step for report in reports),
        max(report.stored for report in reports),
    )
    # Right after a restore the memory has the version with which the round began.
    memory = max([memory, *(report.restored for report in reports if report.restored > 0)])
    return counted.model_copy(
        update={
            "restorable_step": _step(max(memory, stored)),
            "stored_step": _step(stored) if stored >= 0 else counted.stored_step,
            "replicated_step": _step(min(report.replicated for report in reports)),
            "replicas": _replicas(reports),
            "bytes_per_node": max(report.bytes for report in reports),
        }
    )


_REASONS = {
    "WorkersEnded": "no worker with the last step was left to copy it",
    "InStep": "the stop came between the step of an optimizer and the end of save()",
    "CopyLate": "another worker of the node did not end its copy in time",
    "CopyTooLong": "a copy would have taken longer than the steps since the last snapshot",
    "RankStateMissing": "the rank_state of a worker was not there for the last step",
    "WriteFailed": "the copy could not be written; see the worker's log",
    "StateChanged": "something other than the optimizers had changed the parameters or their state",
    "StepsSkipped": "save() is not called after each step of the optimizers",
    "Cost": "keeping the state of each step took more than three quarters of max_overhead",
    "UnsupportedState": (
        "the state has a value that is not kept, such as a sparse tensor or one on a GPU"
    ),
    "RankStateTooLarge": "rank_state is larger than 1 MiB",
    "StateTooLarge": "more than 16 MiB of the state are outside the optimizers",
    "NoTensors": "a rank gave save() a state without tensors",
    "Sharded": "sharded state is not copied",
    "OnDevice": "parameters on a GPU are not copied",
    "NoMemory": "a node has no memory for snapshots",
    "NoOptimizers": "Snapshots was given no optimizers",
}
"""Texts of the reasons for which the last step was not copied at the stop."""


def lost_text(steps: int, ms: int, reason: str = "") -> str:
    """Return text such as `lost 1 step (0.2 s of work)`.

    Args:
        reason: reason of a round, which a newer release may know alone; empty if it is unknown.
    """
    if not steps:
        return "lost no step"
    text = f"lost {steps} step{'s' * (steps > 1)} ({seconds_text(ms)} of work)"
    known = _REASONS.get(reason)
    return f"{text}, without a copy at the stop: {known}" if known else text


def memory_finding(job: ElasticJob, view: RendezvousView) -> list[Finding]:
    """Return SnapshotsInMemory, only for jobs whose workers take snapshots."""
    kind = ConditionType.SNAPSHOTS_IN_MEMORY
    reports = _reports(view)
    bad = [
        (each.name, found) for each, found in reports if found.trouble is not SnapshotTrouble.NONE
    ]
    if bad:
        name, found = bad[0]
        reason, message = _trouble(found)
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        return [Finding(kind, ConditionStatus.FALSE, reason, f"{name}{more}: {message}")]
    if reports and all(found.step >= 0 for _, found in reports):
        return [Finding(kind, ConditionStatus.TRUE, "Held")]
    return _known(job, view, kind)


def storage_finding(job: ElasticJob, view: RendezvousView) -> list[Finding]:
    """Return SnapshotsInStorage, only for jobs whose workers could not write to storage."""
    kind = ConditionType.SNAPSHOTS_IN_STORAGE
    reports = _reports(view)
    bad = [(each.name, found.storage_error) for each, found in reports if found.storage_error]
    known = _known(job, view, kind)
    if bad:
        name, error = bad[0]
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        reason, message = _storage_trouble(error)
        return [Finding(kind, ConditionStatus.FALSE, reason, f"{name}{more}: {message}")]
    # The workers of a new round have no error before their first write.
    if known and any(found.stored >= 0 for _, found in reports):
        return [Finding(kind, ConditionStatus.TRUE, "Written")]
    return known


def _known(job: ElasticJob, view: RendezvousView, kind: ConditionType) -> list[Finding]:
    """Return the condition of the run; none after a resumption, which may have other places."""
    if is_new_run(view, job.status):
        return []
    return [
        Finding(kind, condition.status, condition.reason, condition.message)
        for condition in job.status.conditions
        if condition.type is kind
    ]


def _storage_trouble(error: int) -> tuple[str, str]:
    if error == errno.ETIMEDOUT:
        return STORAGE_SILENT, (
            "the storage does not answer; training goes on, and snapshots are stored again once "
            "it answers"
        )
    name = errno.errorcode.get(error)
    reason = f": {name}" if name else ""
    return STORAGE_UNUSABLE, f"the storage cannot be written{reason}; see the worker's log"


_SENTENCES = {
    ConditionType.SNAPSHOTS_IN_MEMORY: (
        "Snapshots are not in memory, so that a fault costs more steps"
    ),
    ConditionType.SNAPSHOTS_IN_STORAGE: (
        "Snapshots are not in storage, so that the loss of all nodes costs more steps"
    ),
}


def place_sentences(status: Status) -> Iterator[str]:
    """Yield a sentence for each place that has no snapshots at present."""
    for condition in status.conditions:
        if condition.type in _SENTENCES and condition.status is ConditionStatus.FALSE:
            yield f"{_SENTENCES[condition.type]}: {condition.message}"


def size_text(size: int, rounds_up: bool = False) -> str:
    """Format a number of bytes: 900 B, 12.5 MiB.

    Args:
        rounds_up: True for an amount of which less does not suffice.
    """
    amount, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    if unit == "B":
        return f"{amount:.0f} B"
    return f"{math.ceil(amount * 10) / 10 if rounds_up else amount:.1f} {unit}"


def _reports(view: RendezvousView) -> list[tuple[Member, Snapshots]]:
    """Return the members of the current round that report snapshots, in natural order."""
    members = sorted(view.members, key=lambda member: natural_order(member.name))
    return [
        (member, member.snapshots)
        for member in members
        if member.snapshots is not None and member.round == view.round
    ]


def _trouble(found: Snapshots) -> tuple[str, str]:
    if found.trouble is not SnapshotTrouble.NO_ROOM:
        name = errno.errorcode.get(found.error)
        reason = f": {name}" if name else ""
        return (
            MEMORY_UNUSABLE,
            "the folder for snapshots in memory cannot be created or written"
            f"{reason}; see the worker's log",
        )
    size, needed = size_text(found.bytes), size_text(_VERSIONS * found.bytes, rounds_up=True)
    if found.limit:
        return (
            MEMORY_LIMIT_TOO_SMALL,
            "two snapshots, and copies for other nodes, do not fit into "
            f"recovery.snapshots.memoryLimit ({size_text(found.limit)}): set more than "
            f"{size_text(max(_VERSIONS * found.bytes, found.limit), rounds_up=True)}, and enlarge "
            "the trainer's memory limit by as much",
        )
    return (
        SHARED_MEMORY_FULL,
        f"two snapshots of {size} do not fit into /dev/shm: it needs more than {needed}; set "
        "recovery.snapshots.memoryLimit, or enlarge its volume and the trainer's memory limit",
    )


def _replicas(reports: list[Snapshots]) -> ReplicaState:
    if not any(report.replicas for report in reports):
        return ReplicaState.NOT_USED
    whole = all(report.replicated >= 0 for report in reports)
    return ReplicaState.HEALTHY if whole else ReplicaState.INCOMPLETE


def _step(step: int) -> int | None:
    return step if step >= 0 else None
