"""What a plan may ask for. Whoever applies them goes in order and stops at the first that fails."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_operator.core.rendezvous_view import OutcomeKind, StopReason
from elasticjob_operator.core.victims import DeleteReason
from elasticjob_rendezvous.core.bounds import Bounds


@dataclass(frozen=True, slots=True)
class WriteNodes:
    """Set the absent `spec.nodes`, through the scale subresource where there is one."""

    nodes: int


@dataclass(frozen=True, slots=True)
class WriteBounds:
    """Put `bounds` of this incarnation; a number above the observed one begins a new one."""

    incarnation: int
    bounds: Bounds


@dataclass(frozen=True, slots=True)
class CloseRendezvous:
    """Close the rendezvous with this outcome, whatever its state; a no-op when it is closed."""

    incarnation: int
    kind: OutcomeKind
    reason: StopReason
    message: str = ""

    @property
    def detail(self) -> str:
        """What is written beside the outcome: the reason, and what it says of this job."""
        return f"{self.reason}: {self.message}" if self.message else self.reason.value


@dataclass(frozen=True, slots=True)
class RemoveMembers:
    """Take members out of the rendezvous whose pods are gone: nobody else waits for their lease."""

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
    """Delete this very pod, with its own grace, never by force."""

    name: str
    uid: str
    reason: DeleteReason


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job itself: its time to live after the end is over."""


Action = (
    WriteNodes | WriteBounds | CloseRendezvous | RemoveMembers | CreatePod | DeletePod | DeleteJob
)
