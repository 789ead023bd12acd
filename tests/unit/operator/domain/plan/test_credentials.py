"""Rotation of etcd users: age, requests by annotation, and the time of former users."""

from __future__ import annotations

from datetime import timedelta

import pytest

from elasticjob_operator.domain.manifests.names import (
    CREDENTIALS_SINCE_ANNOTATION,
    ROTATE_ANNOTATION,
    ROTATED_ANNOTATION,
)
from elasticjob_operator.domain.plan.user_rotation import (
    CredentialsState,
    RotationReason,
    due_rotation,
    may_remove_former_users,
    secret_annotations,
)
from elasticjob_operator.model import ElasticJob
from tests.unit.operator.builders import NOW, ago, job, later

MONTH = timedelta(days=30)
DAY = 86400.0
NEVER = timedelta()


def requested(value: str) -> ElasticJob:
    plain = job()
    metadata = plain.metadata.model_copy(update={"annotations": {ROTATE_ANNOTATION: value}})
    return plain.model_copy(update={"metadata": metadata})


def secret_of(found: ElasticJob, seconds: float) -> dict[str, object]:
    """Return the Secret that was given a user so long ago."""
    return {"metadata": {"annotations": dict(secret_annotations(found, ago(seconds)))}}


@pytest.mark.parametrize(
    ("days", "maximum", "reason"),
    [
        (29.9, MONTH, None),
        (30, MONTH, RotationReason.AGE),
        (3000, MONTH, RotationReason.AGE),
        (3000, NEVER, None),
    ],
)
def test_user_is_rotated_at_its_maximum_age(
    days: float, maximum: timedelta, reason: RotationReason | None
) -> None:
    state = CredentialsState.of(secret_of(job(), days * DAY), NOW)
    assert due_rotation(job(), state, maximum, NOW, rotated=False) is reason


def test_user_in_secret_of_earlier_release_is_rotated_by_request_alone() -> None:
    """Its agents may have read the Secret once and for all."""
    state = CredentialsState.of({"metadata": {"creationTimestamp": "2020-01-01T00:00:00Z"}}, NOW)
    assert due_rotation(job(), state, MONTH, NOW, rotated=False) is None
    found = due_rotation(requested("1"), state, MONTH, NOW, rotated=False)
    assert found is RotationReason.REQUEST


def test_each_value_of_the_annotation_requests_one_rotation() -> None:
    first = CredentialsState.of(secret_of(job(), 1), NOW)
    assert due_rotation(requested("1"), first, NEVER, NOW, False) is RotationReason.REQUEST
    second = CredentialsState.of(secret_of(requested("1"), 3600), NOW)
    assert second.handled == "1"
    assert due_rotation(requested("1"), second, NEVER, NOW, True) is None
    assert due_rotation(job(), second, NEVER, NOW, True) is None
    assert due_rotation(requested("2"), second, NEVER, NOW, True) is RotationReason.REQUEST


def test_request_waits_until_the_former_user_may_be_removed() -> None:
    for seconds, reason in ((599, None), (600, RotationReason.REQUEST)):
        state = CredentialsState.of(secret_of(requested("1"), seconds), NOW)
        assert due_rotation(requested("2"), state, NEVER, NOW, True) is reason
        assert may_remove_former_users(state, NOW) is (reason is not None)


@pytest.mark.parametrize("text", ["", "yesterday", "2026-01-01T00:00:00", "9999-01-01T00:00:00Z"])
def test_invalid_time_in_the_secret_counts_as_now(text: str) -> None:
    """Whoever may change the Secret neither removes a user early nor rotates without end."""
    state = CredentialsState.of(
        {"metadata": {"annotations": {CREDENTIALS_SINCE_ANNOTATION: text}}}, NOW
    )
    assert state.since == NOW
    assert not may_remove_former_users(state, NOW)
    assert due_rotation(job(), state, timedelta(minutes=1), later(60), rotated=True) is None


def test_secret_of_new_job_counts_the_annotation_as_handled() -> None:
    found = secret_annotations(requested("1"), NOW)
    assert found == {
        CREDENTIALS_SINCE_ANNOTATION: "2026-01-31T12:00:00+00:00",
        ROTATED_ANNOTATION: "1",
    }
