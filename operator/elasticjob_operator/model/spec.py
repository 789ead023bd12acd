"""`spec`: what a user wants of a job. Written by users, `nodes` also by scale and HPA.

Rules between fields are in `rules.py`, beside the CEL that says the same to the API server.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from elasticjob_operator.model.base import (
    INT32_MAX,
    SUBDOMAIN,
    Count,
    Flag,
    NaturalNumber,
    PositiveSeconds,
    Seconds,
    SpecModel,
)
from elasticjob_operator.model.enums import Backend, CleanPodPolicy, ScaleUp, WarmStart
from elasticjob_operator.model.template import PodTemplate

AUTO: Literal["auto"] = "auto"
NPROC_MESSAGE = "must be auto or an integer of at least 1"


def _nproc(value: Any) -> Any:
    is_count = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= INT32_MAX
    if value == AUTO or is_count:
        return value
    raise PydanticCustomError("nproc", NPROC_MESSAGE)


NprocPerNode = Annotated[
    int | Literal["auto"],
    BeforeValidator(_nproc),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "x-kubernetes-validations": [
                {
                    "rule": "type(self) == string ? self == 'auto' : self >= 1",
                    "message": NPROC_MESSAGE,
                }
            ],
        }
    ),
]
Endpoint = Annotated[
    str,
    Field(max_length=260, pattern=r"^(https?://)?([-A-Za-z0-9_.]+|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}$"),
]
ModuleName = Annotated[
    str, Field(max_length=253, pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$")
]
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=SUBDOMAIN)]
ContainerName = Annotated[str, Field(min_length=1, max_length=63)]


class Rendezvous(SpecModel):
    """How the nodes of a job find each other."""

    backend: Backend = Backend.ETCD
    """Who keeps the rendezvous: etcd (v3), etcd-v2 or c10d (torch's own store)."""
    endpoints: Annotated[list[Endpoint], Field(max_length=16)] = Field(default=[])
    """host:port of each server. Absent: the operator's etcd, and for c10d a store that the job's
    first pod keeps. etcd-v2 needs them on a cluster, where the operator's etcd speaks v3 alone."""
    secret_name: ObjectName | None = None
    """Secret with ca.crt, tls.crt, tls.key, username and password for the endpoints."""
    join_timeout_seconds: PositiveSeconds = 600
    """The job fails when minNodes have not come together for this long."""
    last_call_seconds: Seconds = 30
    """How long a round of at least minNodes waits for the wanted size. A recovery does not."""
    keep_alive_seconds: Annotated[PositiveSeconds, Field(ge=2)] = 5
    """A node that is silent for this long is lost. At least 2: etcd grants no shorter lease."""
    confirm_seconds: PositiveSeconds = 5
    """A node that does not confirm a new round for this long is left out of it."""


class Elasticity(SpecModel):
    """When and how the size changes while the job runs."""

    scale_up: ScaleUp = ScaleUp.IMMEDIATE
    """When newcomers may interrupt a round: at once, or after the next checkpoint."""
    scale_up_max_wait_seconds: Seconds = 600
    """Newcomers wait at most this long for a checkpoint."""
    settle_seconds: Seconds = 3
    """Newcomers within this time of each other share a round."""
    pending_timeout_seconds: PositiveSeconds = 60
    """A pod whose launcher has not run for this long is no longer waited for."""
    disruption_budget: Flag = True
    """Whether the job gets a PodDisruptionBudget that keeps minNodes through drains."""


class Recovery(SpecModel):
    """How workers are stopped and started when the membership changes."""

    warm_start: WarmStart = WarmStart.AUTO
    """Fork workers from a preloaded interpreter (Auto), or always start afresh ("Off")."""
    warm_start_modules: Annotated[list[ModuleName], Field(max_length=64)] = Field(default=[])
    """Modules to preload besides those that are found by themselves."""
    stop_grace_seconds: Seconds = 10
    """Seconds from SIGTERM to SIGKILL when workers are stopped for a planned change."""
    hang_timeout_seconds: Seconds = 0
    """Workers without progress for this long are restarted. 0 is off."""


class SchedulingPolicy(SpecModel):
    """What a gang scheduler is told of the job."""

    queue: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Queue of the gang scheduler."""
    priority_class: ObjectName | None = None
    """Priority class of the gang."""
    min_available: Count | None = None
    """Pods that must be placed together. Absent: minNodes."""


class RunPolicy(SpecModel):
    """The life of the job as a whole."""

    suspend: Flag = False
    """True ends all pods and keeps the job; false starts it again."""
    ttl_seconds_after_finished: Seconds | None = None
    """Seconds after its end when the job is deleted. Absent: never."""
    active_deadline_seconds: PositiveSeconds | None = None
    """The job fails when it has been active for this long. Absent: never."""
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    """Pods to delete when the job has finished: None, those still Running, or All."""
    scheduling_policy: SchedulingPolicy | None = None
    """What a gang scheduler is told."""


class ElasticJobSpec(SpecModel):
    """What a user wants of the job."""

    min_nodes: Count = 1
    """The job runs with no fewer nodes than this."""
    max_nodes: Count
    """The job runs with no more nodes than this."""
    nodes: NaturalNumber | None = None
    """Wanted size, as written by kubectl scale and HPA. It is clamped to a legal size and
    status.wantedNodes says to which. Absent: maxNodes."""
    node_increment: Count = 1
    """Legal sizes are minNodes + k * nodeIncrement up to maxNodes. maxNodes need not be one:
    from 2 to 9 by 4 are the sizes 2 and 6. An increment above maxNodes - minNodes leaves
    minNodes as the only size."""
    nproc_per_node: NprocPerNode = AUTO
    """Workers of each node: an integer, or auto: the GPUs of the trainer container, else 1."""
    max_restarts: NaturalNumber = 3
    """Failures of workers after which the job fails. Leaves, losses and resizes are free."""
    trainer: ContainerName | None = None
    """Name of the container that trains. May be absent when the template has just one."""
    rendezvous: Rendezvous = Rendezvous()
    """How the nodes find each other."""
    elasticity: Elasticity = Elasticity()
    """When and how the size changes."""
    recovery: Recovery = Recovery()
    """How workers are stopped and started."""
    run_policy: RunPolicy = RunPolicy()
    """The life of the job as a whole."""
    template: PodTemplate
    """The pod of each node: a PodTemplateSpec."""
