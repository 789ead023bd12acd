"""Parts of the status on refusals: of the API server, and of the rendezvous store."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elasticjob_operator.model.types import StatusModel, Timestamp

MAX_REFUSED = 10
"""Maximum number of pods listed that the API server refuses to delete."""


class CreationRefusal(StatusModel):
    """Refusal to create pods."""

    reason: str
    """Reason in one word, such as QuotaExceeded."""
    message: str = ""
    """Message of the API server or of the operator."""


class DeletionRefusal(StatusModel):
    """Refusal of the API server to delete pods."""

    pods: Annotated[list[str], Field(max_length=MAX_REFUSED)] = Field(default_factory=list)
    """Names of the pods, in natural order, at most ten."""
    count: int = 0
    """Number of pods."""
    message: str = ""
    """Message of the API server on the first of them."""


class MissingStore(StatusModel):
    """Absence of the pod that hosts the store of a c10d job."""

    pod: str
    """Name of the pod."""
    reason: str
    """PredecessorTerminating, NameTaken, NodeNotReady, Terminating, Ended, or an obstacle to
    creating or running the pod, such as Unschedulable."""
    message: str = ""
    """Text of the scheduler, the kubelet or the API server."""
    node: Annotated[str | None, Field(alias="nodeName")] = None
    """Machine of the pod, if that is not ready."""
    since: Timestamp
    """Time at which the operator first observed the absence."""


class StoreRefusal(StatusModel):
    """Refusal of the rendezvous store to accept writes."""

    reason: str
    """NoSpace, Corrupt, PermissionDenied, Unauthenticated, NoUser, NoLeader or Other."""
    message: str = ""
    """Store, endpoint and the store's own error text."""
