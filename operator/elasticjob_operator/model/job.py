"""ElasticJob object: metadata, `spec` and the pod template in it; `status` is in `status.py`.

The spec is the desired state, written by users; `nodes` also by kubectl scale and HPA. Rules
between fields are in `rules.py`, together with their CEL for the API server. The template is
Kubernetes' PodTemplateSpec, with only the fields declared that are read here;
`template_schema.py` has the schema of all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, WrapValidator
from pydantic_core import PydanticCustomError

from elasticjob_operator.model.status import Status
from elasticjob_operator.model.stored_status import read_status
from elasticjob_operator.model.types import (
    INT32_MAX,
    LABEL,
    MAX_ENTRIES,
    MAX_KEYS,
    SET,
    SUBDOMAIN,
    Argument,
    Backend,
    CleanPodPolicy,
    Flag,
    Launch,
    NaturalNumber,
    Nodes,
    OpenModel,
    PositiveSeconds,
    RestartPolicy,
    ScaledNodes,
    ScaleUp,
    Seconds,
    SecondsOfADay,
    ShortText,
    SpecModel,
    Timestamp,
    WarmStart,
)

MAX_CONTAINERS = 16
"""Maximum number of containers, which keeps the API server's cost estimate of the CEL rules within
its limit."""
MAX_VARIABLES = 512
"""Maximum number of variables of a container, for the same reason."""
MAX_VARIABLE_NAME = 256
"""Maximum length of a variable's name, for the same reason."""


INVALID_QUANTITY, INVALID_NPROC = "quantity", "nproc"
OWN_ERRORS = frozenset({INVALID_QUANTITY, INVALID_NPROC})
"""Types of validation errors beside pydantic's."""


def _quantity(value: Any) -> Any:
    if isinstance(value, str) or (isinstance(value, int | float) and not isinstance(value, bool)):
        return str(value)
    raise PydanticCustomError(INVALID_QUANTITY, "must be a quantity such as 2, 500m or 4Gi")


Quantity = Annotated[
    str, BeforeValidator(_quantity), WithJsonSchema({"x-kubernetes-int-or-string": True})
]


class EnvVar(OpenModel):
    """Environment variable of a container."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_VARIABLE_NAME)]
    """Name of the variable."""
    value: Argument | None = None
    """Value of the variable, a string."""


class Resources(OpenModel):
    """Compute resources of a container."""

    limits: Annotated[dict[str, Quantity], Field(max_length=MAX_KEYS)] | None = None
    """Maximum it may use. GPUs are requested here."""
    requests: Annotated[dict[str, Quantity], Field(max_length=MAX_KEYS)] | None = None
    """Amounts reserved for it."""


class Container(OpenModel):
    """Container of the pod template."""

    name: Annotated[str, Field(pattern=LABEL, min_length=1, max_length=63)]
    """A DNS label, unique in the pod."""
    image: ShortText | None = None
    """Image to run."""
    command: Annotated[list[Argument], Field(max_length=MAX_ENTRIES)] | None = None
    """Entry point. Required in the trainer container unless spec.entrypoint gives the image's own,
    which is not known here."""
    args: Annotated[list[Argument], Field(max_length=MAX_ENTRIES)] | None = None
    """Arguments of the command."""
    working_dir: ShortText | None = None
    """Working directory of the command."""
    env: Annotated[list[EnvVar], Field(max_length=MAX_VARIABLES)] | None = None
    """Environment variables."""
    resources: Resources | None = None
    """Compute resources."""


class PodSpec(OpenModel):
    """Spec of the pod."""

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

    labels: Annotated[dict[str, str], Field(max_length=MAX_KEYS)] | None = None
    """Labels of every pod."""
    annotations: Annotated[dict[str, str], Field(max_length=MAX_KEYS)] | None = None
    """Annotations of every pod."""


class PodTemplate(OpenModel):
    """PodTemplateSpec."""

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
    raise PydanticCustomError(INVALID_NPROC, NPROC_MESSAGE)


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
MEMORY_AMOUNT = "^[1-9][0-9]*(k|M|G|T|Ki|Mi|Gi|Ti)?$"
"""Pattern of an amount of memory: whole numbers of bytes or of a unit."""
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=SUBDOMAIN)]
ContainerName = Annotated[str, Field(min_length=1, max_length=63)]
Words = Annotated[list[Argument], Field(max_length=256)]
"""Command with its arguments."""


class Rendezvous(SpecModel):
    """Rendezvous of the job's nodes."""

    backend: Backend = Backend.ETCD
    """Store of the rendezvous: Etcd (v3), EtcdV2 or C10d (torch's own store)."""
    endpoints: Annotated[list[Endpoint], Field(max_length=16, json_schema_extra=SET)] = Field(
        default=[]
    )
    """host:port of each server. Absent: the operator's etcd, or for C10d a store that the job's
    first pod hosts. Required for EtcdV2 on a cluster, where the operator's etcd only serves v3."""
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
    pending_timeout_seconds: PositiveSeconds = 300
    """Seconds from a pod's creation after which the job stops waiting for it, if its launcher has
    not started. The job always waits for images that are being pulled, containers that are being
    created and init containers that run."""
    disruption_budget: Flag = True
    """True creates a PodDisruptionBudget that keeps minNodes during drains."""


class SnapshotStorage(SpecModel):
    """Storage of snapshots, for the loss of all nodes and for suspended jobs. The snapshots of a
    job are in a folder with its name."""

    claim: ObjectName | None = None
    """PersistentVolumeClaim in the job's namespace that all nodes can mount and write. Either claim
    or path must be given."""
    path: Annotated[str, Field(min_length=2, max_length=1024, pattern="^/")] | None = None
    """Absolute path in the trainer container, of a volume of the template that all nodes share."""
    every_seconds: SecondsOfADay = 300
    """Seconds between two snapshots in storage, at least."""
    keep: Annotated[int, Field(strict=True, ge=1, le=100)] = 2
    """Number of complete snapshots to keep. The storage needs room for two more."""


class Snapshots(SpecModel):
    """Snapshots of the training state by elasticjob.train.Snapshots. Arguments in the script take
    precedence."""

    enabled: Flag = True
    """False keeps no snapshots in memory; those in storage go on."""
    interval_seconds: SecondsOfADay | None = None
    """Approximate seconds between two snapshots. Without it and everySteps the interval follows
    from the measured cost."""
    every_steps: Annotated[int, Field(strict=True, ge=1, le=INT32_MAX)] | None = None
    """Steps between two snapshots. Excludes intervalSeconds."""
    replicas: Annotated[int, Field(strict=True, ge=0, le=8)] = 1
    """Number of other nodes that hold a copy of the state of each rank alone."""
    memory_limit: Annotated[str, Field(max_length=20, pattern=MEMORY_AMOUNT)] | None = None
    """Size of a volume in memory for the snapshots of a node, such as 8Gi: more than twice the
    state. It counts towards the memory limit of the trainer container. Absent: /dev/shm."""
    storage: SnapshotStorage | None = None
    """Storage of snapshots. Absent: the script's own, or none."""


class Recovery(SpecModel):
    """Stop and start of workers when the membership changes."""

    warm_start: WarmStart = WarmStart.AUTO
    """Fork workers from a preloaded interpreter if possible (Auto), or Never."""
    warm_start_modules: Annotated[list[ModuleName], Field(max_length=64, json_schema_extra=SET)] = (
        Field(default=[])
    )
    """Modules to preload in addition to those detected automatically."""
    stop_grace_seconds: Seconds = 10
    """Seconds from SIGTERM to SIGKILL when workers stop for a planned change."""
    hang_timeout_seconds: Seconds = 0
    """Seconds without progress after which workers are restarted. 0 is off."""
    snapshots: Snapshots | None = None
    """Settings of snapshots of the training state. Absent: those of the script."""


class SchedulingPolicy(SpecModel):
    """Scheduling of the job's pods."""

    queue: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """Must be absent: nothing acts on it. The scheduler's own labels and annotations in
    template.metadata name its queue."""
    priority_class: ObjectName | None = None
    """Priority class of every pod."""
    min_available: Nodes | None = None
    """Must be absent: nothing acts on it. The scheduler's own PodGroup sets the pods that it places
    together; minNodes is the smallest number that trains."""


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
    """Scheduling of the job's pods."""


class ElasticJobSpec(SpecModel):
    """Desired state of the job."""

    given_min_nodes: Annotated[Nodes | None, Field(alias="minNodes")] = None
    """Minimum number of nodes. Absent: maxNodes, so that the job trains at one size only."""
    max_nodes: Nodes
    """Maximum number of nodes."""
    nodes: ScaledNodes | None = None
    """Wanted size, as written by kubectl scale and HPA. It is clamped to a legal size, shown in
    status.wantedNodes. Absent: maxNodes; the operator then writes that value, and it follows
    maxNodes until somebody else sets this field."""
    node_increment: Nodes = 1
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
    launch: Launch = Launch.AUTO
    """Runs of the trainer's command: PerWorker once for each worker, PerNode once for each pod,
    where torchrun in it joins the job's rendezvous. Auto decides by the command: status.launch."""
    setup: Words = Field(default=[])
    """Command that runs once in each pod, in the trainer container, before the first round."""
    entrypoint: Words = Field(default=[])
    """Entry point of the trainer's image, if its container has no command; args follow it. It is
    printed by docker inspect -f '{{json .Config.Entrypoint}} {{json .Config.Cmd}}' IMAGE."""
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

    @property
    def min_nodes(self) -> int:
        """Minimum number of nodes: minNodes, or maxNodes if it is absent."""
        return self.max_nodes if self.given_min_nodes is None else self.given_min_nodes


GROUP = "elasticjob.dev"
VERSION = "v1alpha1"
API_VERSION: Literal["elasticjob.dev/v1alpha1"] = "elasticjob.dev/v1alpha1"
NESTED_ANNOTATION = f"{GROUP}/starts-launcher"
"""Annotation of a job by `elasticjob run`, which can read the program's files: the place that
starts a launcher. No manifest has it: annotations of a running job may change."""
KIND: Literal["ElasticJob"] = "ElasticJob"
PLURAL = "elasticjobs"
MAX_NAME = 55
"""Maximum length of a job's name: pod names, <job>-<index>, must fit the 63 characters of a DNS
label."""
JOB_NAME = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""Pattern of a job's name: a DNS label with a letter first, because the job's Service has the same
name."""


FIELD_MANAGER = "elasticjob-operator"
"""Field manager of the operator's writes, as shown in metadata.managedFields."""


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


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


class ElasticJob(SpecModel):
    """Elastic PyTorch job."""

    api_version: Literal["elasticjob.dev/v1alpha1"]
    kind: Literal["ElasticJob"]
    metadata: Metadata
    spec: ElasticJobSpec
    status: Annotated[Status, WrapValidator(read_status)] = Field(default_factory=Status)

    @property
    def follows_max_nodes(self) -> bool:
        """True if the wanted size is maxNodes: spec.nodes is absent, or the operator alone set
        it."""
        return self.spec.nodes is None or self._setters_of_nodes() == {FIELD_MANAGER}

    def _setters_of_nodes(self) -> set[str]:
        """Return the field managers that own spec.nodes; empty if they are unknown."""
        entries = (self.metadata.model_extra or {}).get("managedFields")
        found = set()
        for entry in entries if isinstance(entries, list) else ():
            fields = _mapping(_mapping(entry).get("fieldsV1"))
            if "f:nodes" in _mapping(fields.get("f:spec")):
                found.add(str(entry.get("manager", "")))
        return found

    def trainer(self) -> Container:
        """Return the trainer container: the one named by `spec.trainer`, or the only one."""
        containers = self.spec.template.spec.containers
        if self.spec.trainer is None:
            return containers[0]
        return next(found for found in containers if found.name == self.spec.trainer)

    def manifest(self) -> dict[str, Any]:
        """Return the object as a document, for YAML or the API server."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
