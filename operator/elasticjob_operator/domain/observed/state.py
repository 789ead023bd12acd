"""Observed state of a job at one moment: the input of the plan.

Pods do not depend on the platform, the rendezvous does not depend on its storage: every source
(etcd records, agents' reports, the job's status) is mapped to the same types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from elasticjob_operator.model.types import RendezvousState
from elasticjob_rendezvous.protocol.coordinator.repeated_losses import HeldBack
from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    Counts,
    Member,
    MemberState,
    Outcome,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.timings import History
from elasticjob_rendezvous.protocol.store_trouble import StoreTrouble
from elasticjob_rendezvous.protocol.text import printable, shortened


class StopReason(StrEnum):
    """Reason for which the plan closes a rendezvous."""

    SUSPENDED = "Suspended"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    DELETED = "Deleted"
    LAUNCH_FAILED = "LaunchFailed"


@dataclass(frozen=True, slots=True)
class Offence:
    """Failure caused by a machine at a UTC time. `what` is a failure class, such as `NodeLost`."""

    node: str
    at: datetime
    what: str


@dataclass(frozen=True, slots=True)
class RendezvousView:
    """Snapshot of the rendezvous. The default is a rendezvous without members.

    Args:
        state: UNKNOWN if the rendezvous cannot be read; the plan then writes nothing to it.
        round: number of the round; 0 before the first.
        nodes, world_size, master: properties of the round; master is the pod of rank 0.
        waiting: number of members that wait for the next round, for `waiting_reason`.
        held_back: those of them that were lost again, while a round is final.
        since: UTC time of the last transition.
        members: members, in any order.
        ranks: group ranks in the current round by id of the member.
        rounds: cost of any number of rounds, oldest first.
        failures_charged: number of failures charged to the budget.
        interruptions: number of rounds ended for uncharged reasons.
        first_failure: culprit of the latest failure: the worker that failed first in its round.
        offences: failures caused by machines in the rounds still on record, oldest first.
        lost: ids of lost members by the round in which they were lost and their name.
        outcome: set if the state is closed; its `reason` is a `StopReason`, or empty.
    """

    state: RendezvousState = RendezvousState.JOINABLE
    round: int = 0
    nodes: int = 0
    waiting: int = 0
    waiting_reason: str = ""
    held_back: tuple[HeldBack, ...] = ()
    world_size: int = 0
    master: str | None = None
    cause: Cause | None = None
    since: datetime | None = None
    members: tuple[Member, ...] = ()
    ranks: Mapping[str, int] = field(default_factory=dict)
    rounds: tuple[History, ...] = ()
    failures_charged: int = 0
    interruptions: Counts = field(default_factory=Counts)
    offences: tuple[Offence, ...] = ()
    lost: Mapping[tuple[int, str], str] = field(default_factory=dict)
    first_failure: Failure | None = None
    outcome: Outcome | None = None

    @property
    def readable(self) -> bool:
        return self.state is not RendezvousState.UNKNOWN

    @property
    def suspended(self) -> bool:
        """True if it was closed by a suspension: a later incarnation may continue."""
        return self.outcome is not None and self.outcome.reason == StopReason.SUSPENDED

    @property
    def ended(self) -> bool:
        """True if it was closed for any other reason: the job has ended."""
        return self.outcome is not None and not self.suspended

    @property
    def finishing(self) -> bool:
        """True if a member is done: new members can no longer join a round."""
        return any(member.state is MemberState.DONE for member in self.members)

    def ranks_by_name(self) -> dict[str, int]:
        """Return the group ranks in the current round by name of the pod."""
        # Of equal names the first one counts.
        ids = {member.name: member.id for member in reversed(self.members)}
        return {name: self.ranks[id] for name, id in ids.items() if id in self.ranks}


NO_MEMBERS = RendezvousView()
"""View before the first member joins."""
UNREADABLE = RendezvousView(state=RendezvousState.UNKNOWN)
"""View while the rendezvous cannot be read."""


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
    AGENT_RESOURCES = "AgentResourcesRefused"
    OWNER_REMOVED = "OwnerReferencesRemoved"
    NAMESPACE_ENDS = "NamespaceTerminating"
    NAME_CONFLICT = "NameConflict"
    TEMPLATE_INVALID = "TemplateInvalid"
    ENDPOINT = "EndpointNotAllowed"
    SECRET = "SecretUnusable"
    BACKEND = "BackendUnavailable"
    FOREIGN_ETCD = "EtcdOfAnotherCluster"
    RECORDS = "TooManyRecords"
    NOT_SERVED = "NamespaceNotServed"


@dataclass(frozen=True, slots=True)
class Pod:
    """Pod, or in a local job the process group that stands for one.

    Args:
        index: index in the job; held until the object is gone.
        uid: uid, also the id of its member in the rendezvous.
        created_at: creation time, UTC; start of pendingTimeoutSeconds.
        terminating: True if the pod is being deleted (a deletion timestamp is set).
        disruption: the cluster's reason to remove it (evicted, preempted, a taint), as reported.
        ready: True if its launcher runs and its lease exists.
        node: name of the machine, None before it is scheduled.
        node_gone: True if the machine's Node object was deleted; its state is then NotReady.
        launcher_since: UTC time from which its launcher runs, None while it does not.
        obstacle, obstacle_message: obstacle to running the launcher, if known.
        preparing: True if its machine pulls images, creates containers or runs init containers, so
            that its launcher will start without further help.
        over: True if all of its containers have ended, so that its member no longer exists.
        lingering: True if its trainer has ended and another container has not.
        stuck: reason for which its agent gave it up, because the kernel does not end its workers;
            empty otherwise.
        launch_failed: True if its trainer could not be started, or failed before it was a member of
            the rendezvous.
        rejected: True if its machine refused to start it, or ended it before, for a reason that no
            template changes, such as a shutdown.
        ended_at, end_message: end of its trainer, UTC, and its description.
        exit_code: exit code of its trainer; None while it runs or if unknown.
        end: cause of its removal, past or imminent, if known.
        lost_labels: the operator's labels, as `key=value`, that were removed or changed.
        lost_owner: True if the job's entry in its owner references was removed.
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
    node_gone: bool = False
    launcher_since: datetime | None = None
    obstacle: Obstacle | None = None
    obstacle_message: str = ""
    preparing: bool = False
    over: bool = False
    lingering: bool = False
    stuck: str = ""
    launch_failed: bool = False
    rejected: bool = False
    ended_at: datetime | None = None
    end_message: str = ""
    exit_code: int | None = None
    end: PodEnd | None = None
    lost_labels: tuple[str, ...] = ()
    lost_owner: bool = False

    @property
    def ended(self) -> bool:
        """True if its trainer has exited, with success or not."""
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)

    @property
    def active(self) -> bool:
        """True if it is neither ended nor terminating."""
        return not self.terminating and not self.ended


MAX_REFUSAL = 2000
"""Maximum length of the message of a refusal, in characters. The API server and webhooks repeat
invalid values, which may be long, and the status has the message several times."""


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
        text = shortened(printable(message), MAX_REFUSAL)
        return cls(obstacle, text, before.since if before else now)


@dataclass(frozen=True, slots=True)
class NodesRefusal:
    """Refusal of the API server to write `spec.nodes`.

    Args:
        nodes: value that was refused.
        message: message of the server.
        generation: generation of the job at that time.
        retry_at: UTC time of the next attempt, unless the job is changed before.
    """

    nodes: int
    message: str
    generation: int
    retry_at: datetime


@dataclass(frozen=True, slots=True)
class SeenTrouble:
    """Trouble with the store of a rendezvous.

    Args:
        members: uids of the pods whose agents report it; empty if the operator observed it.
        seconds: time for which the operator has observed it. Its start has the time of the
            observer's clock, which may differ from that of the API server.
    """

    trouble: StoreTrouble
    members: tuple[str, ...] = ()
    seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class Observed:
    """Input of the plan besides the job itself.

    Args:
        pods: all existing pods of the job, in any order, terminating ones included.
        rendezvous: view of the rendezvous of the newest incarnation.
        bounds: `bounds` record of that incarnation, None if it is absent.
        incarnation: number of that incarnation, from 1.
        refusal: set while pods cannot be created.
        undeletable: messages of the API server on pods that it refuses to delete, by uid.
        nodes_refusal: set while the API server refuses to write spec.nodes.
        foreign: indices whose pod name is held by a pod of another owner.
        predecessors: those of `foreign` with a pod of a deleted job of the same name, which garbage
            collection deletes.
        store: trouble with the store of the rendezvous, if there is any.
        bounds_revision: revision at which etcd stored the record of `bounds`; 0 if there is none.
        unchecked: ids of members without a listed pod whose pods were not looked up: they may
            exist.
        unreadable_seconds: time for which the rendezvous has been unreadable; infinite if it is
            readable, or if it is not known to become so.
    """

    pods: tuple[Pod, ...] = ()
    rendezvous: RendezvousView = NO_MEMBERS
    bounds: RendezvousParams | None = None
    incarnation: int = 1
    refusal: Refusal | None = None
    undeletable: Mapping[str, str] = field(default_factory=dict)
    nodes_refusal: NodesRefusal | None = None
    foreign: frozenset[int] = frozenset()
    predecessors: frozenset[int] = frozenset()
    store: SeenTrouble | None = None
    bounds_revision: int = 0
    unchecked: frozenset[str] = frozenset()
    unreadable_seconds: float = math.inf


@dataclass(frozen=True, slots=True)
class Observation:
    """Observation of a job. `incarnation_known` is False while the incarnation is only assumed."""

    observed: Observed
    incarnation_known: bool = True
