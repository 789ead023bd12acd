"""What exists of a job at one moment, free of where it runs: the input of the plan."""

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
"""Exit codes that an agent has its launcher end with: the job failed; the rendezvous is over."""


class NodeState(StrEnum):
    """What the machine under a pod is fit for."""

    READY = "Ready"
    CORDONED = "Cordoned"
    TAINTED = "Tainted"
    NOT_READY = "NotReady"


class PodEnd(StrEnum):
    """What took a pod, or is about to; absent where its trainer just ended, or it was deleted."""

    DRAINED = "Drained"  # through the eviction API
    PREEMPTED = "Preempted"  # by the scheduler, for a pod of higher priority
    EVICTED = "Evicted"  # by its node, which ran short of something or shuts down
    NODE_TAINTED = "NodeTainted"
    NODE_LOST = "NodeLost"  # its node is not ready, or no more
    OUT_OF_MEMORY = "OutOfMemory"  # the kernel killed the trainer's container


DISRUPTIONS = {
    "PreemptionByScheduler": PodEnd.PREEMPTED,
    "DeletionByTaintManager": PodEnd.NODE_TAINTED,
    "EvictionByEvictionAPI": PodEnd.DRAINED,
    "DeletionByPodGC": PodEnd.NODE_LOST,
    "TerminationByKubelet": PodEnd.EVICTED,
}
"""What takes a pod, by the word of who disrupts it."""


class Obstacle(StrEnum):
    """Why a pod's launcher cannot run."""

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
    """A pod, or on one machine the process group that plays one.

    Args:
        index: its place in the job; held until the object is gone.
        uid: also the id of its member in the rendezvous.
        created_at: UTC; how long it has been pending counts from here.
        terminating: it was told to go (a deletion timestamp is set).
        disruption: why the cluster wants it gone (evicted, preempted, a taint), in its own word.
        ready: its launcher runs and its lease is there.
        node: name of the machine, None before it has one.
        launcher_since: UTC time from which its launcher runs, None while it does not.
        obstacle, obstacle_message: why the launcher cannot run, when that is known.
        over: all of its containers have ended, so nobody speaks for its member any more.
        lingering: its trainer has ended, and another of its containers has not.
        launch_failed: its trainer could not be started, or ended in failure right after that.
        ended_at, end_message: when and how its trainer ended; UTC.
        exit_code: of its trainer; None while it runs, or where nobody knows.
        end: what took it, or is about to, when that is known.
        lost_labels: of ours, `key=value`, that somebody took off or changed.
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
        """Its trainer has exited, in whichever way."""
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)

    @property
    def active(self) -> bool:
        """Neither ended nor told to go."""
        return not self.terminating and not self.ended


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why pods cannot be created, e.g. because of a quota, since a UTC time."""

    obstacle: Obstacle
    message: str
    since: datetime


@dataclass(frozen=True, slots=True)
class SeenTrouble:
    """Why what keeps a rendezvous cannot be used. `members` are the uids of the pods whose agents
    tell it; none where it was seen from here."""

    trouble: StoreTrouble
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything the plan looks at besides the job itself.

    Args:
        pods: every pod of the job that exists, in any order, terminating ones too.
        rendezvous: one look at the rendezvous of the newest incarnation.
        bounds: what `bounds` of that incarnation holds, None when it is not there.
        incarnation: number of that incarnation, from 1.
        refusal: set while pods cannot be created.
        foreign: indices whose name is held by a pod that is not this job's.
        store: why what keeps the rendezvous cannot be used, if it cannot.
    """

    pods: tuple[Pod, ...] = ()
    rendezvous: RendezvousView = NOBODY_YET
    bounds: Bounds | None = None
    incarnation: int = 1
    refusal: Refusal | None = None
    foreign: frozenset[int] = frozenset()
    store: SeenTrouble | None = None
