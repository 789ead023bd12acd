"""When a Lease is free, until when it is held, and what is written into it.

Two rules keep two replicas from being active at once, whatever their wall clocks say. A holder
counts from the moment at which it *sent* the renewal that was confirmed. Anybody else counts from
the moment at which it first *saw* the Lease as it is now, which is later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """Which Lease, for whom, and how it is kept.

    Args:
        identity: who holds it; no two processes may share one.
        duration_seconds: others may take the Lease when it was not renewed for this long.
        renew_seconds: time between two renewals, and between two looks at another's Lease.
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
        """When the activity is told to end, if no renewal after that sent then is confirmed."""
        return sent_at + 0.75 * self.duration_seconds

    def ends_at(self, sent_at: float) -> float:
        """When the activity has to have ended."""
        return sent_at + self.duration_seconds


@dataclass(frozen=True, slots=True)
class Lease:
    """A Lease object. `holder` is "" when nobody holds it; `renewed` is only compared."""

    version: str
    holder: str = ""
    duration_seconds: float = 0.0
    renewed: str = ""
    transitions: int = 0


@dataclass(frozen=True, slots=True)
class Sighting:
    """Another's Lease, and since when, on a monotonic clock, it has looked like this."""

    lease: Lease
    since: float

    @property
    def free_at(self) -> float:
        """When it may be taken, if it is not renewed before."""
        return self.since + self.lease.duration_seconds if self.lease.holder else self.since


def lease_of(raw: Mapping[str, Any]) -> Lease:
    """What a Lease object says."""
    spec = raw.get("spec") or {}
    return Lease(
        version=raw["metadata"]["resourceVersion"],
        holder=spec.get("holderIdentity") or "",
        duration_seconds=float(spec.get("leaseDurationSeconds") or 0),
        renewed=spec.get("renewTime") or "",
        transitions=spec.get("leaseTransitions") or 0,
    )


def sighting(before: Sighting | None, lease: Lease, now: float) -> Sighting:
    """The Lease as seen now. What others write besides the holder's words starts no new term."""

    def term(one: Lease) -> tuple[str, str, int]:
        return one.holder, one.renewed, one.transitions

    unchanged = before is not None and term(before.lease) == term(lease)
    return Sighting(lease, before.since if before and unchanged else now)


def claim(settings: LeaseSettings, lease: Lease | None, now: datetime) -> Json:
    """The body that takes or renews the Lease as it was read; None: that creates it."""
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


def release(lease: Lease) -> Json:
    """The body that lets go of the Lease as it was last written."""
    return {"metadata": {"resourceVersion": lease.version}, "spec": {"holderIdentity": None}}


def _micro_time(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
