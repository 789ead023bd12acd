"""Observed state of a job at one moment, independent of its platform: the input of the plan."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from elasticjob_operator.core.rendezvous_view import NOBODY_YET, RendezvousView
from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.store_trouble import StoreTrouble


class PodPhase(StrEnum):
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"


GIVEN_UP = frozenset({1, 3})
"""Exit codes of a launcher ended by its agent: 1, the job failed; 3, the rendezvous refused the
agent, was closed, or its join timed out."""


class NodeState(StrEnum):
    """State of the machine under a pod."""

    READY = "Ready"
    CORDONED = "Cordoned"
    TAINTED = "Tainted"
    NOT_READY = "NotReady"


class PodEnd(StrEnum):
    """Cause of a pod's removal, past or imminent; absent if its trainer ended or it was deleted."""

    DRAINED = "Drained"  # through the eviction API
    PREEMPTED = "Preempted"  # by the scheduler, for a pod of higher priority
    EVICTED = "Evicted"  # by its node, which ran short of something or shuts down
    NODE_TAINTED = "NodeTainted"
    NODE_LOST = "NodeLost"  # its node is not ready or no longer exists
    OUT_OF_MEMORY = "OutOfMemory"  # the kernel killed the trainer's container


DISRUPTIONS = {
    "PreemptionByScheduler": PodEnd.PREEMPTED,
    "DeletionByTaintManager": PodEnd.NODE_TAINTED,
    "EvictionByEvictionAPI": PodEnd.DRAINED,
    "DeletionByPodGC": PodEnd.NODE_LOST,
    "TerminationByKubelet": PodEnd.EVICTED,
}
"""PodEnd by the reason of a pod's DisruptionTarget condition."""


class Obstacle(StrEnum):
    """Obstacle that keeps a pod's launcher from running."""

    UNSCHEDULABLE = "Unschedulable"
    IMAGE = "ImageUnavailable"
    CONFIG = "ConfigError"
    INIT = "InitFailed"
    QUOTA = "QuotaExceeded"
    REFUSED = "CreationRefused"
    NAME_CONFLICT = "NameConflict"
    TEMPLATE_INVALID = "TemplateInvalid"
    ENDPOINT = "EndpointNotAllowed"
    BACKEND = "BackendUnavailable"
    ANOTHERS_ETCD = "EtcdOfAnotherCluster"


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod, or in a local job the process group that stands for one.

    Args:
        index: index in the job; held until the object is gone.
        uid: uid, also the id of its member in the rendezvous.
        created_at: creation time, UTC; start of pendingTimeoutSeconds.
        terminating: True if the pod is being deleted (a deletion timestamp is set).
        disruption: the cluster's reason to remove it (evicted, preempted, a taint), as reported.
        ready: True if its launcher runs and its lease exists.
        node: name of the machine, None before it is scheduled.
        launcher_since: UTC time from which its launcher runs, None while it does not.
        obstacle, obstacle_message: obstacle to running the launcher, if known.
        over: True if all of its containers have ended, so that its member no longer exists.
        lingering: True if its trainer has ended and another container has not.
        launch_failed: True if its trainer could not be started or failed right after its start.
        ended_at, end_message: end of its trainer, UTC, and its description.
        exit_code: exit code of its trainer; None while it runs or if unknown.
        end: cause of its removal, past or imminent, if known.
        lost_labels: the operator's labels, as `key=value`, that were removed or changed.
    """

    index: int
    name: str
    uid: str
    created_at: datetime
    phase: PodPhase = PodPhase.PENDING
    ready: bool = False
    terminating: bool = False
    disruption: str = ""
    node: str | None = None
    node_state: NodeState = NodeState.READY
    launcher_since: datetime | None = None
    obstacle: Obstacle | None = None
    obstacle_message: str = ""
    over: bool = False
    lingering: bool = False
    launch_failed: bool = False
    ended_at: datetime | None = None
    end_message: str = ""
    exit_code: int | None = None
    end: PodEnd | None = None
    lost_labels: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        """True if its trainer has exited, with success or not."""
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)

    @property
    def active(self) -> bool:
        """True if it is neither ended nor terminating."""
        return not self.terminating and not self.ended


@dataclass(frozen=True, slots=True)
class Refusal:
    """Obstacle to creating pods, such as a quota, and the UTC time since which it exists."""

    obstacle: Obstacle
    message: str
    since: datetime

    @classmethod
    def after(
        cls, before: Refusal | None, obstacle: Obstacle, message: str, now: datetime
    ) -> Refusal:
        """Return the newest refusal in a row; its time is that of the first."""
        return cls(obstacle, message, before.since if before else now)


@dataclass(frozen=True, slots=True)
class SeenTrouble:
    """Trouble with the store of a rendezvous. `members` are the uids of the pods whose agents
    report it; empty if the operator observed it."""

    trouble: StoreTrouble
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Observed:
    """Input of the plan besides the job itself.

    Args:
        pods: all existing pods of the job, in any order, terminating ones included.
        rendezvous: view of the rendezvous of the newest incarnation.
        bounds: `bounds` record of that incarnation, None if it is absent.
        incarnation: number of that incarnation, from 1.
        refusal: set while pods cannot be created.
        foreign: indices whose pod name is held by a pod of another owner.
        store: trouble with the store of the rendezvous, if there is any.
    """

    pods: tuple[Pod, ...] = ()
    rendezvous: RendezvousView = NOBODY_YET
    bounds: Bounds | None = None
    incarnation: int = 1
    refusal: Refusal | None = None
    foreign: frozenset[int] = frozenset()
    store: SeenTrouble | None = None


@dataclass(frozen=True, slots=True)
class Sight:
    """Observation of a job. `incarnation_known` is False while the incarnation is only assumed."""

    observed: Observed
    incarnation_known: bool = True
