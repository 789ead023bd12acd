"""Absence of the pod that hosts the store of a c10d job: its reason, start and remedy."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from elasticjob_operator.domain.explain.catalog import OBSTACLES, obstacle_remedy
from elasticjob_operator.domain.explain.phrases import clock, quoted
from elasticjob_operator.domain.observed.state import MAX_REFUSAL, Obstacle
from elasticjob_operator.domain.plan.backends import StoreAbsence, StoreObstacle
from elasticjob_operator.model.refusals import MissingStore
from elasticjob_operator.model.status import Status
from elasticjob_rendezvous.protocol.text import printable, shortened


def missing_store(
    absence: StoreAbsence | None, before: Status, now: datetime
) -> MissingStore | None:
    """Return the absence for the status. Its start is that of the first status in a row."""
    if absence is None:
        return None
    known = before.missing_store
    return MissingStore(
        pod=absence.pod,
        reason=absence.reason.value,
        message=shortened(printable(absence.message), MAX_REFUSAL),
        node=absence.node,
        since=now if known is None else known.since,
    )


def awaited_text(absence: StoreAbsence) -> str:
    """Return the event after which the store's pod is created; empty for an obstacle of it."""
    match absence.reason:
        case StoreObstacle.PREDECESSOR:
            return (
                f"{absence.pod}, which hosts the store, is created once the deleted job's pod of "
                "this name is gone"
            )
        case StoreObstacle.NAME_TAKEN:
            return (
                f"{absence.pod}, which hosts the store, cannot be created: a pod of another owner "
                "has its name"
            )
        case StoreObstacle.NODE_NOT_READY | StoreObstacle.TERMINATING | StoreObstacle.ENDED:
            lost = absence.node is not None
            where = f"; its machine {absence.node} is not ready" if lost else ""
            new = f"a new {absence.pod}, which hosts the store, is created once the old one is gone"
            return f"{new}{where}"
    return ""


def store_absence_sentences(status: Status) -> Iterator[str]:
    """Yield the absence of the store with its start, and the remedy."""
    found = status.missing_store
    if found is None:
        return
    message = f": {quoted(found.message)}" if found.message else ""
    yield (
        f"The store of the rendezvous has been missing since {clock(found.since)}, and no round "
        f"can form without it: its pod {found.pod} {_state(found)}{message}"
    )
    if remedy := _remedy(found):
        yield remedy


def _state(found: MissingStore) -> str:
    match found.reason:
        case StoreObstacle.PREDECESSOR:
            return "waits for the end of the deleted job's pod of this name"
        case StoreObstacle.NAME_TAKEN:
            return "cannot be created, because a pod of another owner has its name"
        case StoreObstacle.NODE_NOT_READY:
            return f"is on the machine {found.node}, which does not answer"
        case StoreObstacle.TERMINATING:
            return "is being stopped, and its successor is created once it is gone"
        case StoreObstacle.ENDED:
            return "has ended, and its successor is created once it is gone"
    obstacle = _obstacle(found)
    meaning = OBSTACLES[obstacle].meaning if obstacle is not None else ""
    return f"is {meaning}" if meaning else "cannot be created"


def _obstacle(found: MissingStore) -> Obstacle | None:
    """Return the obstacle; None for one of a newer operator."""
    return next((one for one in Obstacle if one.value == found.reason), None)


def _remedy(found: MissingStore) -> str:
    match found.reason:
        case StoreObstacle.NAME_TAKEN:
            return f"Delete the other pod {found.pod}, or rename the job"
        case StoreObstacle.NODE_NOT_READY:
            return (
                "Once that machine is known to be off, run `kubectl delete node "
                f"{found.node}` or `kubectl delete pod {found.pod} --force`"
            )
        case StoreObstacle.TERMINATING:
            return (
                f"If {found.pod} stays, `kubectl get pod {found.pod} -o yaml` shows its finalizers "
                "and its machine"
            )
    obstacle = _obstacle(found)
    return obstacle_remedy(obstacle, found.message) if obstacle is not None else ""
