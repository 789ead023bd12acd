"""ElasticJob object: metadata, `spec` and the pod template in it; `status` is in `status.py`.

The spec is the desired state, written by users; `nodes` also by kubectl scale and HPA. Rules
between fields are in `rules.py`, together with their CEL for the API server. The template is
Kubernetes' PodTemplateSpec, with only the fields declared that are read here: all others are
kept, and the API server validates them when pods are created.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from elasticjob_operator.model.status import Status
from elasticjob_operator.model.types import (
    LABEL,
    SUBDOMAIN,
    Backend,
    CleanPodPolicy,
    Count,
    Flag,
    NaturalNumber,
    OpenModel,
    PositiveSeconds,
    RestartPolicy,
    ScaleUp,
    Seconds,
    SpecModel,
    Timestamp,
    WarmStart,
)

MAX_CONTAINERS = 16
"""Maximum number of containers, which keeps the API server's cost estimate of the CEL rules within
its limit."""


def _quantity(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        return str(value)
    raise PydanticCustomError("quantity", "must be a quantity such as 2, 500m or 4Gi")


Quantity = Annotated[
    str, BeforeValidator(_quantity), WithJsonSchema({"x-kubernetes-int-or-string": True})
]


class EnvVar(OpenModel):
    """An environment variable of a container."""

    name: Annotated[str, Field(min_length=1)]
    """Name of the variable."""
    value: str | None = None
    """Value of the variable, a string."""


class Resources(OpenModel):
    """Compute resources of a container."""

    limits: dict[str, Quantity] | None = None
    """Maximum it may use. GPUs are requested here."""
    requests: dict[str, Quantity] | None = None
    """Amounts reserved for it."""


class Container(OpenModel):
    """A container of the pod template. Fields not declared here are kept."""

    name: Annotated[str, Field(pattern=LABEL, min_length=1, max_length=63)]
    """A DNS label, unique in the pod."""
    image: str | None = None
    """Image to run."""
    command: list[str] | None = None
    """Entry point. Required in the trainer container: the image's own entry point is not known."""
    args: list[str] | None = None
    """Arguments of the command."""
    working_dir: str | None = None
    """Working directory of the command."""
    env: list[EnvVar] | None = None
    """Environment variables."""
    resources: Resources | None = None
    """Compute resources."""


class PodSpec(OpenModel):
    """Spec of the pod. Fields not declared here are kept."""

    containers: Annotated[list[Container], Field(min_length=1, max_length=MAX_CONTAINERS)]
    """Containers of the pod, one of them the trainer."""
    init_containers: Annotated[list[Container], Field(max_length=MAX_CONTAINERS)] | None = None
    """Containers that run before the others."""
    restart_policy: RestartPolicy | None = None
    """Must be absent or Never: the job restarts workers itself, the kubelet must not."""
    termination_grace_period_seconds: Seconds | None = None
    """Maximum seconds from a pod's deletion to its end."""


class TemplateMetadata(OpenModel):
    """Metadata given to every pod."""

    labels: dict[str, str] | None = None
    """Labels of every pod."""
    annotations: dict[str, str] | None = None
    """Annotations of every pod."""


class PodTemplate(OpenModel):
    """A PodTemplateSpec."""

    metadata: TemplateMetadata | None = None
    """Labels and annotations of every pod."""
    spec: PodSpec
    """Spec of every pod."""


NPROC_WORDS = ("auto", "gpu", "cpu")
MAX_NPROC = 1024
"""Maximum number of workers per node that an agent accepts."""
NPROC_MESSAGE = f"must be auto, gpu, cpu or an integer from 1 to {MAX_NPROC}"
_NPROC = re.compile(r"[1-9][0-9]*")


def _nproc(value: Any) -> Any:
    number = int(value) if isinstance(value, str) and _NPROC.fullmatch(value) else value
    is_count = isinstance(number, int) and not isinstance(number, bool)
    if number in NPROC_WORDS or (is_count and 1 <= number <= MAX_NPROC):
        return number
    raise PydanticCustomError("nproc", NPROC_MESSAGE)


NprocPerNode = Annotated[
    int | Literal["auto", "gpu", "cpu"],
    BeforeValidator(_nproc),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "x-kubernetes-validations": [
                {
                    "rule": f"type(self) == string ? self in {list(NPROC_WORDS)} || "
                    f"(self.matches('^[1-9][0-9]{{0,3}}$') && int(self) <= {MAX_NPROC}) : "
                    f"self >= 1 && self <= {MAX_NPROC}",
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
    """Rendezvous of the job's nodes."""

    backend: Backend = Backend.ETCD
    """Store of the rendezvous: etcd (v3), etcd-v2 or c10d (torch's own store)."""
    endpoints: Annotated[list[Endpoint], Field(max_length=16)] = Field(default=[])
    """host:port of each server. Absent: the operator's etcd, or for c10d a store that the job's
    first pod hosts. Required for etcd-v2 on a cluster, where the operator's etcd only serves v3."""
    secret_name: ObjectName | None = None
    """Secret with ca.crt, tls.crt, tls.key, username and password for the endpoints."""
    join_timeout_seconds: PositiveSeconds = 600
    """Seconds after which the job fails if fewer than minNodes have joined."""
    last_call_seconds: Seconds = 30
    """Maximum seconds a round of at least minNodes waits for the wanted size. A recovery does not
    wait."""
    keep_alive_seconds: Annotated[PositiveSeconds, Field(ge=2)] = 5
    """Seconds of silence after which a node is lost. At least 2: etcd grants no shorter lease."""
    confirm_seconds: PositiveSeconds = 5
    """Seconds after which a node that has not confirmed a new round is left out of it."""


class Elasticity(SpecModel):
    """Changes of size while the job runs."""

    scale_up: ScaleUp = ScaleUp.IMMEDIATE
    """Time at which new nodes may interrupt a round: at once, or after the next checkpoint."""
    scale_up_max_wait_seconds: Seconds = 600
    """Maximum seconds that new nodes wait for a checkpoint."""
    settle_seconds: Seconds = 3
    """New nodes that arrive within this many seconds of each other share a round."""
    pending_timeout_seconds: PositiveSeconds = 60
    """Seconds after which the job stops waiting for a pod whose launcher has not started."""
    disruption_budget: Flag = True
    """True creates a PodDisruptionBudget that keeps minNodes during drains."""


class Recovery(SpecModel):
    """Stop and start of workers when the membership changes."""

    warm_start: WarmStart = WarmStart.AUTO
    """Fork workers from a preloaded interpreter (Auto), or always start them afresh ("Off")."""
    warm_start_modules: Annotated[list[ModuleName], Field(max_length=64)] = Field(default=[])
    """Modules to preload in addition to those detected automatically."""
    stop_grace_seconds: Seconds = 10
    """Seconds from SIGTERM to SIGKILL when workers stop for a planned change."""
    hang_timeout_seconds: Seconds = 0
    """Seconds without progress after which workers are restarted. 0 is off."""


class SchedulingPolicy(SpecModel):
    """Settings for a gang scheduler."""

    queue: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Queue of the gang scheduler."""
    priority_class: ObjectName | None = None
    """Priority class of the gang."""
    min_available: Count | None = None
    """Pods that must be placed together. Absent: minNodes."""


class RunPolicy(SpecModel):
    """Lifetime and suspension of the job."""

    suspend: Flag = False
    """True deletes all pods and keeps the job; false starts it again."""
    ttl_seconds_after_finished: Seconds | None = None
    """Seconds from the job's end to its deletion. Absent: never."""
    active_deadline_seconds: PositiveSeconds | None = None
    """Seconds of activity after which the job fails. Absent: never."""
    clean_pod_policy: CleanPodPolicy = CleanPodPolicy.RUNNING
    """Pods to delete when the job has finished: None, those still Running, or All."""
    scheduling_policy: SchedulingPolicy | None = None
    """Settings for a gang scheduler."""


class ElasticJobSpec(SpecModel):
    """Desired state of the job."""

    min_nodes: Count = 1
    """Minimum number of nodes."""
    max_nodes: Count
    """Maximum number of nodes."""
    nodes: NaturalNumber | None = None
    """Wanted size, as written by kubectl scale and HPA. It is clamped to a legal size, shown in
    status.wantedNodes. Absent: maxNodes."""
    node_increment: Count = 1
    """Legal sizes are minNodes + k * nodeIncrement up to maxNodes. maxNodes need not be one: from
    2 to 9 by 4 the sizes are 2 and 6. An increment above maxNodes - minNodes leaves minNodes as
    the only size."""
    nproc_per_node: NprocPerNode | None = None
    """Workers per node: an integer, or a word of torchrun's --nproc-per-node, which is counted in
    the trainer container: auto (accelerators, or CPUs if there are none), gpu (accelerators; none
    is an error) or cpu. Absent: the number that torchrun or accelerate launch in the command names,
    otherwise one for each accelerator, or 1 if there are none."""
    max_restarts: NaturalNumber = 3
    """Failures of workers after which the job fails. Leaves, losses and resizes do not count."""
    trainer: ContainerName | None = None
    """Name of the trainer container. May be absent if the template has only one container."""
    rendezvous: Rendezvous = Rendezvous()
    """Rendezvous of the nodes."""
    elasticity: Elasticity = Elasticity()
    """Changes of size while the job runs."""
    recovery: Recovery = Recovery()
    """Stop and start of workers."""
    run_policy: RunPolicy = RunPolicy()
    """Lifetime and suspension of the job."""
    template: PodTemplate
    """Template of each node's pod: a PodTemplateSpec."""


GROUP = "elasticjob.dev"
VERSION = "v1alpha1"
API_VERSION: Literal["elasticjob.dev/v1alpha1"] = "elasticjob.dev/v1alpha1"
KIND: Literal["ElasticJob"] = "ElasticJob"
PLURAL = "elasticjobs"
MAX_NAME = 55
"""Maximum length of a job's name: pod names, <job>-<index>, must fit the 63 characters of a DNS
label."""
JOB_NAME = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""Pattern of a job's name: a DNS label with a letter first, because the job's Service has the same
name."""


class Metadata(OpenModel):
    """Object metadata. Fields not declared here are kept."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME, pattern=JOB_NAME)]
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    deletion_timestamp: Timestamp | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class ElasticJob(SpecModel):
    """An elastic PyTorch job."""

    api_version: Literal["elasticjob.dev/v1alpha1"]
    kind: Literal["ElasticJob"]
    metadata: Metadata
    spec: ElasticJobSpec
    status: Status = Field(default_factory=Status)

    def trainer(self) -> Container:
        """Return the trainer container: the one named by `spec.trainer`, or the only one."""
        containers = self.spec.template.spec.containers
        if self.spec.trainer is None:
            return containers[0]
        return next(found for found in containers if found.name == self.spec.trainer)

    def manifest(self) -> dict[str, Any]:
        """Return the object as a document, for YAML or the API server."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
