"""`status` of a job: its observed state. Computed in memory and written once per pass, only by the
operator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from elasticjob_operator.model.refusals import (
    CreationRefusal,
    DeletionRefusal,
    MissingStore,
    StoreRefusal,
)
from elasticjob_operator.model.types import (
    ConditionStatus,
    ConditionType,
    Generation,
    Launch,
    LaunchReason,
    Milliseconds,
    Phase,
    RendezvousState,
    ReplicaState,
    StatusModel,
    Step,
    Timestamp,
    by,
)

MAX_MEMBERS = 100
"""Maximum number of members listed; more would make the object too large to watch."""
MAX_ROUNDS = 10
"""Maximum number of rounds kept."""
MAX_SENTENCES = 32
"""Maximum number of sentences in the explanation, which usually has far fewer."""
MAX_AVOIDED = 10
"""Maximum number of avoided nodes, and of stragglers."""
MAX_HELD_BACK = 10
"""Maximum number of nodes listed that are not admitted to a round yet."""
MAX_ROUND_MEMBERS = 10
"""Maximum number of pods kept with each round."""
MAX_UNSAVED = 16
"""Maximum number of pods listed that did not save."""
MAX_REASONS = 10
"""Maximum number of reasons kept with each round."""


UNKNOWN_REASON = "Unknown"
"""Reason of a condition that was stored without one."""


class Condition(StatusModel):
    """Condition of the job, in Kubernetes' format."""

    type: ConditionType
    """Type of the condition."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: Annotated[str, Field(min_length=1)]
    """Reason in one CamelCase word."""
    message: str = ""
    """Reason in a sentence."""
    observed_generation: Generation = 0
    """Generation of the spec at the observation."""
    last_transition_time: Timestamp
    """Time of the last change of status."""

    @model_validator(mode="before")
    @classmethod
    def _with_reason(cls, document: Any) -> Any:
        """Add a reason to a condition that was stored without one."""
        if isinstance(document, Mapping) and not document.get("reason"):
            return {**document, "reason": UNKNOWN_REASON}
        return document


class CauseStatus(StatusModel):
    """Cause of a round."""

    kind: str
    """Kind of the cause: start, join, leave, loss, failure, scaleDown and others."""
    members: list[str] = Field(default_factory=list)
    """Pods that caused the round."""
    reason: str = ""
    """Reason for the departure of the pods, if known: Drained, Preempted, Evicted, NodeTainted,
    NodeLost or OutOfMemory."""
    detail: str = ""
    """Further details in a sentence."""
    reasons: Annotated[list[str], Field(max_length=MAX_REASONS)] = Field(default_factory=list)
    """Reasons such as SIGTERM, EvictionByEvictionAPI or PeersAborted, at most ten."""


class HeldBackNode(StatusModel):
    """Node that was lost repeatedly without progress, and is not admitted to a round yet."""

    pod: str
    """Name of the pod."""
    losses: int
    """Number of losses in a row."""
    seconds: int
    """Time from the first to the last of them."""
    delay_seconds: int
    """Time for which it must have been registered before it is admitted."""


class RendezvousStatus(StatusModel):
    """State of the rendezvous."""

    state: RendezvousState = RendezvousState.UNKNOWN
    """State of the rendezvous: setup, joinable, frozen, final or closed; Unknown if unreadable."""
    round: int = 0
    """Number of the round."""
    nodes: int = 0
    """Number of nodes in the round."""
    waiting: int = 0
    """Number of nodes that wait for the next round."""
    waiting_reason: str | None = None
    """Reason for which nodes wait, if they wait for more than a moment."""
    held_back: Annotated[list[HeldBackNode], Field(max_length=MAX_HELD_BACK)] = Field(
        default_factory=list
    )
    """Waiting nodes that were lost repeatedly without progress, at most ten."""
    world_size: int = 0
    """Number of workers in the round."""
    master: str | None = None
    """Pod of rank 0."""
    cause: CauseStatus | None = None
    """Cause of the round."""
    since: Timestamp | None = None
    """Start of this state."""


class MemberStatus(StatusModel):
    """One node in the rendezvous."""

    pod: str
    """Name of the pod."""
    node: Annotated[str | None, Field(alias="nodeName")] = None
    """Name of the machine."""
    rank: int | None = None
    """Group rank in the round; absent if it has none."""
    state: str
    """State of its agent: waiting, running, stopping, leaving or done."""
    round: int = 0
    """Round of its workers."""
    step: Step | None = None
    """Last step reported by its workers, up to a minute old."""
    checkpoint_step: Step | None = None
    """Last step of this round that a checkpoint contains."""
    start: str | None = None
    """Start of its workers: warm (forked from a preloaded interpreter) or cold. Absent if
    recovery.warmStart is Never, and after another agent took the workers over."""
    cold_reason: str | None = None
    """Reason for the cold start."""


class RoundStatus(StatusModel):
    """One round and its cost."""

    round: int
    """Number of the round."""
    cause: str
    """Kind of the cause."""
    members: Annotated[list[str], Field(max_length=MAX_ROUND_MEMBERS)] = Field(default_factory=list)
    """Pods that caused the round, at most ten."""
    reason: str = ""
    """Reason for the departure of the pods, if known, as in rendezvous.cause."""
    detail: str = ""
    """Further details of the cause in a sentence."""
    reasons: Annotated[list[str], Field(max_length=MAX_REASONS)] = Field(default_factory=list)
    """Reasons as in rendezvous.cause."""
    nodes: int
    """Number of nodes in the round."""
    final_time: Timestamp | None = None
    """Time at which the round became final."""
    detect_ms: Milliseconds | None = None
    """Milliseconds from the first symptom to the decision."""
    stop_ms: Milliseconds | None = None
    """Milliseconds until all old workers had stopped."""
    join_ms: Milliseconds | None = None
    """Milliseconds until the nodes had joined."""
    backoff_ms: Milliseconds | None = None
    """Milliseconds of back-off after failures in a row; not part of any other phase."""
    confirm_ms: Milliseconds | None = None
    """Milliseconds until all nodes had confirmed and the round was final."""
    start_ms: Milliseconds | None = None
    """Milliseconds until all workers had started."""
    recovery_ms: Milliseconds | None = None
    """Milliseconds from the first symptom until all workers had started: the sum of the phases from
    detectMs to startMs. For a join or scale-down detectMs is left out: until the decision nothing
    was interrupted."""
    first_step_ms: Milliseconds | None = None
    """Milliseconds from the start of all workers until each had reported a step; absent if they
    report none."""
    cold_nodes: int | None = None
    """Number of nodes whose workers were started cold and had to import everything again; absent if
    recovery.warmStart is Never."""
    cold_reason: str | None = None
    """Reason for the cold start on the slowest node."""
    lost_steps: Step | None = None
    """Number of completed steps that this round repeats, known after the first step: exact if the
    script takes snapshots, else a minimum, as after the loss of all nodes; absent if it reports no
    steps."""
    lost_ms: Milliseconds | None = None
    """Milliseconds that these steps had taken, if the script takes snapshots; absent after the loss
    of all nodes."""
    lost_reason: str | None = None
    """Reason for which the state of the last of these steps was not copied at the stop, such as
    NoOptimizers or StepsSkipped; absent if it is unknown."""


class FailureStatus(StatusModel):
    """One failure: the first worker that failed in its round, the culprit and not its victims."""

    round: int
    """Round of the failure."""
    pod: str
    """Name of the pod."""
    node: Annotated[str | None, Field(alias="nodeName")] = None
    """Name of the machine."""
    rank: int | None = None
    """Global rank of the worker."""
    exit_code: int | None = None
    """Exit code, if it exited."""
    signal: int | None = None
    """Signal that ended it, if one did."""
    class_: Annotated[str, Field(alias="class")] = ""
    """UserError, HostOutOfMemory, CudaOutOfMemory, CollectiveTimeout, Hang, PeerAbort, Signal,
    LaunchError, NodeLost, Preempted or another."""
    message: str = ""
    """Error message."""
    traceback: str = ""
    """Python traceback, if there was one."""
    returned: bool | None = None
    """Return of a node with class NodeLost: true if its agent registered again from the same pod,
    false if that pod has ended or was deleted; absent while unknown."""


class StopStatus(StatusModel):
    """Planned stop of the whole job, and the checkpoint before it."""

    reason: str
    """Reason for the stop: Suspended, DeadlineExceeded or Deleted."""
    result: str
    """Saved, TimedOut, SaveFailed, Interrupted, NotSupported, NoTime or NotTraining."""
    step: Step | None = None
    """Last step that the workers reported before the stop."""
    checkpoint_step: Step | None = None
    """Last step of the last round that a checkpoint contains."""
    unsaved: Annotated[list[str], Field(max_length=MAX_UNSAVED)] = Field(default_factory=list)
    """Pods without a complete checkpoint, or whose scripts do not save on request, at most 16."""
    error: str = ""
    """Error of the storage to which the checkpoint could not be written, with the rank; with NoTime
    the reason for which it was not requested, other than the grace period."""


class AvoidedNode(StatusModel):
    """Machine that ended rounds of the job repeatedly."""

    node: Annotated[str, Field(alias="nodeName")]
    """Name of the machine."""
    until: Timestamp
    """Time until which new pods prefer other machines."""
    reason: str = ""
    """Number and kinds of its failures."""


def _named_nodes(value: Any) -> Any:
    """Drop avoided nodes of earlier releases, whose names the API server does not return."""
    if not isinstance(value, list):
        return value
    return [one for one in value if not isinstance(one, Mapping) or {"node", "nodeName"} & {*one}]


class Straggler(StatusModel):
    """Node whose own work per step takes at least 1.5 times as long as its peers'."""

    pod: str
    """Name of the pod."""
    node: Annotated[str | None, Field(alias="nodeName")] = None
    """Name of the machine."""
    round: int
    """Round in which it is slower."""
    since: Timestamp
    """Time of the first observation."""


class LaunchFailures(StatusModel):
    """Pods that could not be started, or failed before they were nodes of the rendezvous."""

    pod: str
    """Name of the last one."""
    count: int = 1
    """Number of these pods."""
    message: str = ""
    """End of the last one."""


class LaunchStatus(StatusModel):
    """Launch of the trainer's command."""

    mode: Launch
    """PerWorker or PerNode."""
    reason: LaunchReason
    """Reason in one word."""
    message: str = ""
    """Reason in a sentence."""
    program: str | None = None
    """Digest of the containers, volumes and launch fields of the job in whose files the pods found
    the launcher; the finding is kept until they change."""


class Interruptions(StatusModel):
    """Number of rounds that ended for reasons not charged as restarts; each round counts once."""

    losses: int = 0
    """Rounds ended by the loss of a node: it died, was silent or was cut off."""
    leaves: int = 0
    """Rounds ended by the leave of a node: its pod was deleted, or the job was scaled down."""
    preemptions: int = 0
    """Rounds ended because the cluster removed a node: evicted, preempted or tainted."""
    joins: int = 0
    """Rounds ended because nodes joined."""
    others: int = 0
    """Rounds ended for other reasons: fewer nodes wanted, master port in use, etcd's data lost."""


class SnapshotsStatus(StatusModel):
    """Snapshots of the training state, as the workers report them every few seconds."""

    restorable_step: Step | None = None
    """Newest step with which training would continue: complete in the memory of all nodes, or in
    storage."""
    stored_step: Step | None = None
    """Newest step of this round in storage."""
    replicated_step: Step | None = None
    """Newest step with copies of each rank's own state on other nodes."""
    replicas: ReplicaState = ReplicaState.NOT_USED
    """NotUsed, Healthy, or Incomplete: the loss of a node would cost the state of its ranks."""
    reached_step: Step | None = None
    """Newest step of the last round with a first step, up to a minute old. It outlives the nodes, a
    suspension and the operator, so that the steps which the next round repeats can be counted."""
    began_step: Step | None = None
    """Step with which that round began."""
    reached_round: int = 0
    """Number of that round; 0 if it is one of a run before."""
    program: str | None = None
    """Digest of the containers, volumes and launch fields of the job in that round: after a
    suspension reachedStep is kept only if they are the same."""
    bytes_per_node: Annotated[int, Field(json_schema_extra={"format": "int64"})] = 0
    """Size of one snapshot in the memory of a node; a node holds two."""
    lost_steps: Step = 0
    """Number of steps that were repeated since the start, or the last resumption."""
    lost_ms: Milliseconds = 0
    """Milliseconds that these steps had taken; after the loss of all nodes estimated with the mean
    duration of the steps of the round before, and of the run for steps before that round."""
    paused_ms: Milliseconds = 0
    """Milliseconds without training since the first step, in pauses that are over: recoveries and
    planned changes up to the next first step, rounds without one, waits for nodes."""
    paused_since: Timestamp | None = None
    """Start of the current pause; absent while the job trains."""
    goodput_percent: int | None = None
    """Share of the time since the first step in which steps were completed that were kept: neither
    repeated nor paused. The time ends with the job or its suspension, and begins again with the
    first step after a resumption; absent if the script reports no steps."""
    counted_round: int = 0
    """Last round in lostSteps, lostMs and pausedMs."""
    since: Timestamp | None = None
    """Time of the first step since the start or the last resumption."""


class PodCounts(StatusModel):
    """Number of pods by state, as last observed."""

    desired: int = 0
    """Number of pods that the job wants: status.wantedNodes, or 0 if it is suspended or has
    finished."""
    active: int = 0
    """Number of pods that have neither ended nor are being deleted."""
    ready: int = 0
    """Number of active pods that are Ready."""
    pending: int = 0
    """Number of active pods whose trainer container has not started."""
    terminating: int = 0
    """Number of pods that are being deleted and have not ended."""
    failed: int = 0
    """Number of pods that ended in failure and still exist."""


def _pod_counts(value: Any) -> Any:
    """Drop the plain number of pods that previous releases wrote."""
    return None if isinstance(value, int) else value


class Status(StatusModel):
    """Observed state of the job."""

    phase: Phase | None = None
    """State of the job in one word."""
    launch: LaunchStatus | None = None
    """Launch of the trainer's command, as spec.launch requests or Auto decides; absent while the
    command cannot be launched."""
    rendezvous: RendezvousStatus | None = None
    """State of the rendezvous."""
    nodes: int = 0
    """Number of nodes that train: members of the final round whose workers run. For a finished job
    the number that trained last."""
    pods: Annotated[PodCounts | None, BeforeValidator(_pod_counts)] = None
    """Number of pods by state."""
    ready_nodes: int = 0
    """Number of pods that are Ready and count towards the size."""
    wanted_nodes: int = 0
    """Wanted size after clamping to a legal one."""
    selector: str | None = None
    """Label selector of the pods, for the scale subresource."""
    restarts: int = 0
    """Number of failures charged against maxRestarts."""
    interruptions: Interruptions | None = None
    """Number of rounds ended for reasons other than charged failures."""
    avoided_nodes: Annotated[
        list[AvoidedNode], Field(max_length=MAX_AVOIDED), BeforeValidator(_named_nodes)
    ] = Field(default_factory=list)
    """Machines that new pods avoid for a while."""
    stragglers: Annotated[list[Straggler], Field(max_length=MAX_AVOIDED)] = Field(
        default_factory=list
    )
    """Nodes that their peers wait for, if the script reports "busy_seconds"."""
    members: Annotated[list[MemberStatus], Field(max_length=MAX_MEMBERS)] = Field(
        default_factory=list
    )
    """Nodes in the rendezvous, in natural order, at most 100."""
    rounds: Annotated[
        list[RoundStatus], Field(max_length=MAX_ROUNDS, json_schema_extra=by("round"))
    ] = Field(default_factory=list)
    """Last ten rounds, oldest first."""
    snapshots: SnapshotsStatus | None = None
    """Snapshots of the training state; absent if the script takes none."""
    explanation: Annotated[list[str], Field(max_length=MAX_SENTENCES)] = Field(default_factory=list)
    """State of the job and its causes in sentences, as printed by "elasticjob explain"."""
    first_failure: FailureStatus | None = None
    """First failure of the run, which begins with the job's start or resumption."""
    last_failure: FailureStatus | None = None
    """Latest failure of the run."""
    last_stop: StopStatus | None = None
    """Last planned stop of the whole job; absent once it trains again."""
    checkpoint_request_time: Timestamp | None = None
    """Time at which the workers were asked for a checkpoint before a planned stop; absent once the
    pods are deleted."""
    launch_failures: LaunchFailures | None = None
    """Pods that failed at launch since the last round; absent once they are replaced."""
    refusal: CreationRefusal | None = None
    """Refusal to create pods; absent if pods can be created or all wanted pods are ready."""
    deletion_refusal: DeletionRefusal | None = None
    """Refusal to delete pods that are to end; absent once they can be deleted or are wanted
    again."""
    missing_store: MissingStore | None = None
    """Absence of the pod that hosts the store of a c10d job; absent while it runs or starts."""
    store_refusal: StoreRefusal | None = None
    """Refusal of the rendezvous store to accept writes; absent while it accepts them or cannot be
    reached."""
    conditions: Annotated[list[Condition], Field(json_schema_extra=by("type"))] = Field(
        default_factory=list
    )
    """Conditions of the job."""
    observed_generation: Generation = 0
    """Generation of the spec from which this status was computed."""
    start_time: Timestamp | None = None
    """Time at which the job started, or was resumed after a suspension."""
    completion_time: Timestamp | None = None
    """Time at which the job finished."""
