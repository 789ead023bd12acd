"""Rotation of a job's etcd user: the rotation that is due, and the removal of former users.

A rotation adds a user with the same role and writes its name and password to the job's Secret. The
former user stays until the agents have read the Secret again. All state is in the annotations of
the Secret and in etcd's users, so an operator may be replaced after each step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from elasticjob_operator.domain.json_object import Json
from elasticjob_operator.domain.manifests.names import (
    CREDENTIALS_SINCE_ANNOTATION,
    ROTATE_ANNOTATION,
    ROTATED_ANNOTATION,
)
from elasticjob_operator.model.job import ElasticJob

FORMER_USER_TIME = timedelta(minutes=10)
"""Minimum time for which a former user stays. The kubelet renews a mounted Secret within about two
minutes."""
MAX_CLOCK_SKEW = timedelta(minutes=5)


class RotationReason(StrEnum):
    """Reason of a rotation, in the words of its event."""

    AGE = "their maximum age was reached"
    REQUEST = f"annotation {ROTATE_ANNOTATION} was set or changed"


@dataclass(frozen=True, slots=True)
class CredentialsState:
    """Annotations of a job's Secret about its etcd user.

    Args:
        since: time since which the Secret names the user; None in a Secret of an earlier release,
            whose agents may read it only once.
        handled: value of the job's annotation that was handled last; empty for none.
    """

    since: datetime | None = None
    handled: str = ""

    @classmethod
    def of(cls, secret: Json, now: datetime) -> CredentialsState:
        """Return the state in a Secret; a malformed or future time counts as `now`."""
        found = (secret.get("metadata") or {}).get("annotations") or {}
        text = found.get(CREDENTIALS_SINCE_ANNOTATION)
        since = None if text is None else _time(str(text), now)
        return cls(since, str(found.get(ROTATED_ANNOTATION) or ""))


def requested_rotation(job: ElasticJob) -> str:
    """Return the value of the job's annotation that requests a rotation; empty without one."""
    return (job.metadata.annotations or {}).get(ROTATE_ANNOTATION, "")


def secret_annotations(job: ElasticJob, now: datetime) -> Mapping[str, str]:
    """Return the annotations of a Secret that names a new user since `now`."""
    found = {CREDENTIALS_SINCE_ANNOTATION: now.astimezone(UTC).isoformat(timespec="seconds")}
    if requested := requested_rotation(job):
        found[ROTATED_ANNOTATION] = requested
    return found


def due_rotation(
    job: ElasticJob,
    state: CredentialsState,
    maximum_age: timedelta,
    now: datetime,
    rotated: bool,
) -> RotationReason | None:
    """Return the reason of the rotation that is due at `now`; None if none is.

    A request waits until the user before the last may be removed, so that their number is bounded.

    Args:
        maximum_age: maximum age of a user; zero for no rotation by age.
        rotated: True if the present user is not the job's first one.
    """
    age = None if state.since is None else now - state.since
    requested = requested_rotation(job)
    if requested and requested != state.handled:
        waits = rotated and age is not None and age < FORMER_USER_TIME
        return None if waits else RotationReason.REQUEST
    if maximum_age and age is not None and age >= max(maximum_age, FORMER_USER_TIME):
        return RotationReason.AGE
    return None


def may_remove_former_users(state: CredentialsState, now: datetime) -> bool:
    """Return True if the agents have had the time to read the present user from the Secret."""
    return state.since is None or now - state.since >= FORMER_USER_TIME


def _time(text: str, now: datetime) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return now
    if found.tzinfo is None or found > now + MAX_CLOCK_SKEW:
        return now
    return found
