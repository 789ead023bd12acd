"""Actions of a plan. They are applied in order, up to the first one that fails."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_operator.core.mirrored import outcome_record
from elasticjob_operator.core.rendezvous_view import StopReason
from elasticjob_operator.core.victims import DeleteReason
from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.records import Outcome, OutcomeKind


@dataclass(frozen=True, slots=True)
class WriteNodes:
    """Set the absent `spec.nodes`, through the scale subresource on a cluster."""

    nodes: int


@dataclass(frozen=True, slots=True)
class WriteBounds:
    """Put the `bounds` record of `incarnation`; a number above the observed one starts a new
    incarnation."""

    incarnation: int
    bounds: Bounds


@dataclass(frozen=True, slots=True)
class CloseRendezvous:
    """Close the rendezvous with this outcome from any state; a no-op once it is closed."""

    incarnation: int
    kind: OutcomeKind
    reason: StopReason
    message: str = ""

    @property
    def outcome(self) -> Outcome:
        """Record to write."""
        return outcome_record(self.kind, self.reason, self.message)


@dataclass(frozen=True, slots=True)
class RemoveMembers:
    """Remove members whose pods are gone, so that no other member waits for their leases."""

    incarnation: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create the pod with this index, whose agent joins this incarnation."""

    index: int
    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete the pod with this uid, with its own grace period, never by force."""

    name: str
    uid: str
    reason: DeleteReason


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job itself: ttlSecondsAfterFinished has passed."""


Action = (
    WriteNodes | WriteBounds | CloseRendezvous | RemoveMembers | CreatePod | DeletePod | DeleteJob
)
