"""Leader election with a Lease object: validity of the lease and bodies of its writes.

Two rules keep two replicas from being active at once, independent of their wall clocks. A holder
counts from the time at which it *sent* the renewal that was confirmed. Other replicas count from
the time at which they first *saw* the Lease in its present form, which is later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Name, identity and timing of a Lease.

    Args:
        identity: holder identity, unique to the process.
        duration_seconds: time without a renewal after which others may take the Lease.
        renew_seconds: interval of renewals, and of reads of another holder's Lease.
    """

    namespace: str
    name: str
    identity: str
    duration_seconds: int = 8
    renew_seconds: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < 2 * self.renew_seconds < self.duration_seconds:
            raise ValueError(
                f"renew_seconds must be less than half of duration_seconds, so that a renewal may "
                f"fail: got {self.renew_seconds} and {self.duration_seconds}"
            )

    def cancels_at(self, sent_at: float) -> float:
        """Return the time at which the activity is cancelled, if no renewal after the one sent at
        `sent_at` is confirmed."""
        return sent_at + 0.75 * self.duration_seconds

    def ends_at(self, sent_at: float) -> float:
        """Return the time by which the activity must have ended."""
        return sent_at + self.duration_seconds


@dataclass(frozen=True, slots=True)
class Lease:
    """Lease object. `holder` is "" if it is free; `renewed` is only compared for equality."""

    version: str
    holder: str = ""
    duration_seconds: float = 0.0
    renewed: str = ""
    transitions: int = 0


@dataclass(frozen=True, slots=True)
class ObservedLease:
    """Lease held by another replica, and the monotonic time at which its present form was first
    seen."""

    lease: Lease
    since: float

    @property
    def free_at(self) -> float:
        """Monotonic time at which the Lease may be taken if it is not renewed before."""
        return self.since + self.lease.duration_seconds if self.lease.holder else self.since


def parse_lease(raw: Mapping[str, Any]) -> Lease:
    """Parse a Lease object."""
    spec = raw.get("spec") or {}
    return Lease(
        version=raw["metadata"]["resourceVersion"],
        holder=spec.get("holderIdentity") or "",
        duration_seconds=float(spec.get("leaseDurationSeconds") or 0),
        renewed=spec.get("renewTime") or "",
        transitions=spec.get("leaseTransitions") or 0,
    )


def observe_lease(before: ObservedLease | None, lease: Lease, now: float) -> ObservedLease:
    """Return the sighting of the Lease at `now`. Only a change of holder, renewTime or
    leaseTransitions restarts its term; other writes do not."""

    def term(one: Lease) -> tuple[str, str, int]:
        return one.holder, one.renewed, one.transitions

    unchanged = before is not None and term(before.lease) == term(lease)
    return ObservedLease(lease, before.since if before and unchanged else now)


def claim_body(settings: LeaseSettings, lease: Lease | None, now: datetime) -> Json:
    """Return the body that acquires or renews the Lease as read, or creates it for None."""
    spec: Json = {
        "holderIdentity": settings.identity,
        "leaseDurationSeconds": settings.duration_seconds,
        "renewTime": _micro_time(now),
    }
    if lease is None or lease.holder != settings.identity:
        spec["acquireTime"] = spec["renewTime"]
        spec["leaseTransitions"] = 0 if lease is None else lease.transitions + 1
    if lease is None:
        return {"metadata": {"name": settings.name}, "spec": spec}
    return {"metadata": {"resourceVersion": lease.version}, "spec": spec}


def release_body(lease: Lease) -> Json:
    """Return the body that releases the Lease as last written."""
    return {"metadata": {"resourceVersion": lease.version}, "spec": {"holderIdentity": None}}


def _micro_time(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
