"""Availability of a Lease, and the fields written into it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from elasticjob_operator.replica.lease import (
    Lease,
    LeaseSettings,
    claim_body,
    observe_lease,
    parse_lease,
    release_body,
)

SETTINGS = LeaseSettings("system", "operator", "me")
NOW = datetime(2026, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC)
HELD = Lease("7", "other", 8.0, "2026-01-31T11:00:00.000000Z", 3)


def test_lease_is_read_from_its_object() -> None:
    raw: dict[str, Any] = {
        "metadata": {"name": "operator", "resourceVersion": "7"},
        "spec": {
            "holderIdentity": "other",
            "leaseDurationSeconds": 8,
            "renewTime": "2026-01-31T11:00:00.000000Z",
            "leaseTransitions": 3,
        },
    }
    assert parse_lease(raw) == HELD
    assert parse_lease({"metadata": {"resourceVersion": "1"}}) == Lease("1")
    assert parse_lease({"metadata": {"resourceVersion": "1"}, "spec": {}}) == Lease("1")


def test_foreign_lease_is_free_after_its_duration_without_renewal() -> None:
    first = observe_lease(None, HELD, 100.0)
    assert first.free_at == 108.0
    assert observe_lease(first, HELD, 105.0).free_at == 108.0
    renewed = Lease("8", "other", 8.0, "2026-01-31T11:00:02.000000Z", 3)
    assert observe_lease(first, renewed, 105.0).free_at == 113.0
    taken = Lease("8", "third", 20.0, "2026-01-31T11:00:00.000000Z", 4)
    assert observe_lease(first, taken, 105.0).free_at == 125.0


def test_foreign_write_to_lease_object_does_not_extend_the_lease() -> None:
    labelled = Lease("9", "other", 8.0, HELD.renewed, 3)
    found = observe_lease(observe_lease(None, HELD, 100.0), labelled, 105.0)
    assert (found.free_at, found.lease.version) == (108.0, "9")


def test_lease_without_holder_is_free_at_once() -> None:
    assert observe_lease(None, Lease("7", "", 8.0), 100.0).free_at == 100.0


def test_absent_lease_is_created() -> None:
    assert claim_body(SETTINGS, None, NOW) == {
        "metadata": {"name": "operator"},
        "spec": {
            "holderIdentity": "me",
            "leaseDurationSeconds": 8,
            "acquireTime": "2026-01-31T12:00:00.250000Z",
            "renewTime": "2026-01-31T12:00:00.250000Z",
            "leaseTransitions": 0,
        },
    }


def test_foreign_lease_is_taken_at_the_version_read() -> None:
    found = claim_body(SETTINGS, HELD, NOW)
    assert found["metadata"] == {"resourceVersion": "7"}
    assert found["spec"]["holderIdentity"] == "me"
    assert found["spec"]["leaseTransitions"] == 4
    assert found["spec"]["acquireTime"] == found["spec"]["renewTime"]


def test_own_lease_is_only_renewed() -> None:
    found = claim_body(SETTINGS, Lease("9", "me", 8.0, "before", 4), NOW)
    assert found["metadata"] == {"resourceVersion": "9"}
    assert found["spec"].keys() == {"holderIdentity", "leaseDurationSeconds", "renewTime"}


def test_lease_is_released_at_the_version_last_written() -> None:
    assert release_body(HELD) == {
        "metadata": {"resourceVersion": "7"},
        "spec": {"holderIdentity": None},
    }


def test_activity_is_cancelled_before_another_can_take_the_lease() -> None:
    assert SETTINGS.cancels_at(100.0) == 106.0 < SETTINGS.ends_at(100.0) == 108.0


@pytest.mark.parametrize(("duration", "renew"), [(8, 4.0), (8, 0.0), (1, 2.0)])
def test_durations_without_time_for_a_failed_renewal_are_refused(
    duration: int, renew: float
) -> None:
    with pytest.raises(ValueError, match="renew_seconds must be less than half"):
        LeaseSettings("system", "operator", "me", duration, renew)
