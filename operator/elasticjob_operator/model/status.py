"""`status`: what is. Computed in memory and written once a pass, by the operator alone."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from elasticjob_operator.model.base import Generation, Milliseconds, StatusModel, Step, Timestamp
from elasticjob_operator.model.enums import (
    ConditionStatus,
    ConditionType,
    Phase,
    RendezvousState,
)

MAX_MEMBERS = 100
"""Members listed in the status: more would make the object too large to watch."""
MAX_ROUNDS = 10
"""Rounds kept in the status."""
MAX_SENTENCES = 32
"""Sentences of the explanation; it has fewer by far."""
MAX_AVOIDED = 10
"""Machines and nodes named as poor ones."""
MAX_ROUND_MEMBERS = 10
"""Pods kept with each of them."""


class Condition(StatusModel):
    """One observation, as Kubernetes' conditions are."""

    type: ConditionType
    """What is observed."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: str = ""
    """Why, in one CamelCase word."""
    message: str = ""
    """Why, for people."""
    observed_generation: Generation = 0
    """The generation of the spec that it was observed on."""
    last_transition_time: Timestamp
    """When the status last changed."""


class CauseStatus(StatusModel):
    """Why a round began."""

    kind: str
    """The kind of cause: start, join, leave, loss, failure, scaleDown and others."""
    members: list[str] = Field(default_factory=list)
    """Pods behind it."""
    reason: str = ""
    """What took them, where their pods say it: Drained, Preempted, Evicted, NodeTainted,
    NodeLost or OutOfMemory."""
    detail: str = ""
    """More, for people."""


class RendezvousStatus(StatusModel):
    """The mirror of the rendezvous."""

    state: RendezvousState = RendezvousState.UNKNOWN
    """joinable, frozen, final or closed; Unknown when it can't be read."""
    round: int = 0
    """Number of the round."""
    nodes: int = 0
    """Nodes in the round."""
    waiting: int = 0
    """Nodes that wait for the next round."""
    waiting_reason: str | None = None
    """Why they wait, when it is not for a moment."""
    world_size: int = 0
    """Workers in the round."""
    master: str | None = None
    """Pod of rank 0."""
    cause: CauseStatus | None = None
    """Why the round began."""
    since: Timestamp | None = None
    """When this state began."""


class MemberStatus(StatusModel):
    """One node in the rendezvous."""

    pod: str
    """Name of the pod."""
    node: str | None = None
    """Name of the machine."""
    rank: int | None = None
    """Its place in the round; absent while it has none."""
    state: str
    """What its agent does: waiting, running, stopping, leaving or done."""
    round: int = 0
    """The round its workers belong to."""
    step: Step | None = None
    """The last step that its workers told, up to a minute ago."""
    checkpoint_step: Step | None = None
    """The last step of this round that a checkpoint contains."""
    start: str | None = None
    """How its workers were started: warm, forked from a preloaded interpreter, or cold; absent
    where recovery.warmStart is Off, and after another agent took them over."""
    cold_reason: str | None = None
    """Why they were started cold."""


class RoundStatus(StatusModel):
    """One round and what it cost."""

    round: int
    """Number of the round."""
    cause: str
    """Kind of its cause."""
    members: Annotated[list[str], Field(max_length=MAX_ROUND_MEMBERS)] = Field(default_factory=list)
    """Pods behind its cause, at most ten."""
    reason: str = ""
    """What took them, where their pods say it, as in rendezvous.cause."""
    detail: str = ""
    """More about its cause, for people."""
    nodes: int
    """Nodes in it."""
    final_time: Timestamp | None = None
    """When it was final."""
    detect_ms: Milliseconds | None = None
    """Milliseconds from the first symptom to the decision."""
    stop_ms: Milliseconds | None = None
    """Milliseconds until all old workers had stopped."""
    join_ms: Milliseconds | None = None
    """Milliseconds until its nodes had come together."""
    backoff_ms: Milliseconds | None = None
    """Milliseconds for which it was put off, after failures in a row; part of no other time."""
    confirm_ms: Milliseconds | None = None
    """Milliseconds until all of them had confirmed, and the round was final."""
    start_ms: Milliseconds | None = None
    """Milliseconds until all workers had started."""
    recovery_ms: Milliseconds | None = None
    """The sum of these: milliseconds from the first symptom until all workers had started. Of a
    join and a scale-down without detectMs: until then nothing was interrupted."""
    first_step_ms: Milliseconds | None = None
    """Milliseconds from there until all workers had reported a step; absent if they do not."""
    cold_nodes: int | None = None
    """On how many nodes workers were started cold, and had to import everything anew; absent where
    recovery.warmStart is Off."""
    cold_reason: str | None = None
    """Why, on the node where it took longest."""


class FirstFailure(StatusModel):
    """The first failed worker of the latest failure: the culprit, not its victims."""

    round: int
    """The round it failed in."""
    pod: str
    """Its pod."""
    node: str | None = None
    """Its machine."""
    rank: int | None = None
    """Its global rank."""
    exit_code: int | None = None
    """Its exit code, when it exited."""
    signal: int | None = None
    """The signal that ended it, when one did."""
    class_: Annotated[str, Field(alias="class")] = ""
    """UserError, HostOutOfMemory, CudaOutOfMemory, CollectiveTimeout, Hang, PeerAbort, Signal,
    LaunchError, NodeLost, Preempted or another."""
    message: str = ""
    """What went wrong."""
    traceback: str = ""
    """Python's traceback, when there was one."""


class AvoidedNode(StatusModel):
    """A machine that took rounds from the job again and again."""

    node: str
    """Name of the machine."""
    until: Timestamp
    """Until when new pods prefer others."""
    reason: str = ""
    """What it did."""


class Straggler(StatusModel):
    """A node whose own work in a step takes it half as long again as its peers, or more."""

    pod: str
    """Name of the pod."""
    node: str | None = None
    """Name of the machine."""
    round: int
    """The round in which it is slower."""
    since: Timestamp
    """Since when."""


class Interruptions(StatusModel):
    """How many rounds ended for reasons that cost no restart; each round is counted once."""

    losses: int = 0
    """A node was lost: it died, fell silent or was cut off."""
    leaves: int = 0
    """A node left: its pod was deleted, or the job was scaled down."""
    preemptions: int = 0
    """A node had to leave because the cluster wanted it gone: evicted, preempted or tainted."""
    joins: int = 0
    """Nodes joined."""
    others: int = 0
    """Anything else: fewer nodes wanted, a taken master port, etcd's data lost."""


class Status(StatusModel):
    """What is."""

    phase: Phase | None = None
    """Where the job is, in one word."""
    rendezvous: RendezvousStatus | None = None
    """The mirror of the rendezvous."""
    nodes: int = 0
    """Nodes that train: members of the final round whose workers run. Of a finished job those that
    trained last."""
    pods: int = 0
    """Pods that count towards the size."""
    ready_nodes: int = 0
    """Pods that are Ready."""
    wanted_nodes: int = 0
    """The wanted size after clamping to a legal one."""
    selector: str | None = None
    """Label selector of the pods, for the scale subresource."""
    restarts: int = 0
    """Charged failures."""
    interruptions: Interruptions | None = None
    """What else ended rounds, apart from the charged failures."""
    avoided_nodes: Annotated[list[AvoidedNode], Field(max_length=MAX_AVOIDED)] = Field(
        default_factory=list
    )
    """Machines that new pods avoid for a time."""
    stragglers: Annotated[list[Straggler], Field(max_length=MAX_AVOIDED)] = Field(
        default_factory=list
    )
    """Nodes that their peers wait for, where the script tells "busy_seconds"."""
    members: Annotated[list[MemberStatus], Field(max_length=MAX_MEMBERS)] = Field(
        default_factory=list
    )
    """Nodes in the rendezvous, in natural order, at most 100."""
    rounds: Annotated[list[RoundStatus], Field(max_length=MAX_ROUNDS)] = Field(default_factory=list)
    """The last ten rounds, oldest first."""
    explanation: Annotated[list[str], Field(max_length=MAX_SENTENCES)] = Field(default_factory=list)
    """Where the job stands and why, in plain sentences: what "elasticjob explain" says."""
    first_failure: FirstFailure | None = None
    """The culprit of the latest failure."""
    conditions: Annotated[
        list[Condition],
        Field(
            json_schema_extra={
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
            }
        ),
    ] = Field(default_factory=list)
    """Observations."""
    observed_generation: Generation = 0
    """The generation of the spec that this status was computed from."""
    start_time: Timestamp | None = None
    """When the job began, or began again after a suspension."""
    completion_time: Timestamp | None = None
    """When the job finished."""
