"""Containers added to each pod, launcher installer and agent, and their environment.

The variables are those of the agent's settings. Paths that agent and trainer share are the same in
both.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_operator.domain.json_object import Json
from elasticjob_operator.domain.manifests import names
from elasticjob_operator.domain.manifests.owned_objects import (
    CA,
    CERT,
    JOB_KEY,
    KEY,
    PASSWORD,
    USER,
    Access,
)
from elasticjob_operator.domain.manifests.template_rules import own_variable
from elasticjob_operator.domain.plan.backends import (
    STORE_PORT,
    agent_params,
    endpoints_of,
    is_steered,
    keeps_store,
)
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.types import Backend, Launch
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.keys import job_prefix

AGENT = ("python", "-m", "elasticjob_agent")
HEALTH_PORT_NAME = "elasticjob"
STORE_PORT_NAME = "elasticjob-c10d"
IMAGE_USER = 65532

KEEP_ROUNDS = 10
LOGS_MIB = 512
_SPARE_MIB = 64
"""Space for error files and progress files of workers, in MiB."""
COUNTED = "launcher"
"""Value of the agent's `ELASTICJOB_SLOTS` for the number that the launcher counts."""


@dataclass(frozen=True, slots=True)
class PodSettings:
    """Operator settings for the pods of all jobs.

    Args:
        pull_secrets: names of Secrets in the job's namespace.
        endpoints: etcd endpoints with their scheme, as reachable from pods.
        cpu, memory: requests of each added container.
        cpu_limit, memory_limit: limits and requests of each added container in pods where it has
            limits.
        always_limited: True if it has limits in every pod, False if only in pods that are
            otherwise of class Guaranteed.
        server_name: name in etcd's certificate, if it differs from the endpoint's host.
    """

    sidecar_image: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    cpu: str = "50m"
    memory: str = "64Mi"
    cpu_limit: str = "500m"
    memory_limit: str = "128Mi"
    always_limited: bool = False
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class PodTraits:
    """Properties of the user's pod spec that affect the added containers.

    Args:
        host_network: True if the pod uses the host's network, where other pods may hold any fixed
            port.
        root: True if the pod runs as root; the added containers do not.
        token: True if the pod mounts the service account token; the added containers do not.
        bounded_disk: True if the trainer has a limit of ephemeral storage. The kubelet sums the
            limits of the whole pod, so the logs need a share.
        guaranteed: True if the pod is of class Guaranteed without the added containers.
        pod_level: resources that the pod's spec sets for the whole pod. The requests of all
            containers must fit into them.
        launch: PerWorker or PerNode.
    """

    host_network: bool = False
    root: bool = False
    token: bool = False
    bounded_disk: bool = False
    guaranteed: bool = False
    pod_level: frozenset[str] = frozenset()
    launch: Launch = Launch.PER_WORKER


def launcher(settings: PodSettings, traits: PodTraits) -> Json:
    """Return the init container that copies the launcher into the shared volume."""
    return {
        "name": names.LAUNCHER_CONTAINER,
        **_image(settings),
        "command": [*AGENT, "install-launcher", names.LAUNCHER_PATH],
        **_confined(settings, traits),
        "volumeMounts": [mount(names.SHARED_VOLUME, names.SHARED_PATH), *_hidden_token(traits)],
    }


def agent(
    job: ElasticJob,
    index: int,
    incarnation: int,
    settings: PodSettings,
    access: Access,
    traits: PodTraits,
    workers: str,
) -> Json:
    """Return the agent's native sidecar, which starts before the trainer and ends after it.

    `workers` is the number of workers per node, or a word by which the launcher counts them.
    """
    return {
        "name": names.AGENT_CONTAINER,
        **_image(settings),
        "command": list(AGENT),
        "restartPolicy": "Always",
        "env": [
            *_identity(job, names.pod_name(job.metadata.name, index), incarnation),
            variable("SLOTS", workers if workers.isdigit() else COUNTED),
            *_torchrun(job, traits),
            *_rendezvous(job, settings, access),
            *_backend(job, index),
            *_agent_settings(job, traits),
        ],
        **_probed(traits, keeps_store(job, index)),
        # Runs as soon as the pod is deleted; SIGTERM follows only after the trainer's end.
        "lifecycle": {"preStop": {"exec": {"command": [*AGENT, "leave", "its pod is to end"]}}},
        **_confined(settings, traits),
        "volumeMounts": [
            mount(names.SHARED_VOLUME, names.SHARED_PATH),
            mount(names.LOGS_VOLUME, names.LOGS_PATH),
            mount(names.CONTROL_VOLUME, names.CONTROL_PATH),
            mount(names.ACCESS_VOLUME, names.ACCESS_PATH) | {"readOnly": True},
            *_hidden_token(traits),
        ],
    }


def _image(settings: PodSettings) -> Json:
    return {"image": settings.sidecar_image, "imagePullPolicy": settings.pull_policy}


def _identity(job: ElasticJob, name: str, incarnation: int) -> list[Json]:
    metadata = job.metadata
    return [
        variable("PREFIX", job_prefix(metadata.namespace, metadata.uid, incarnation)),
        _field("MEMBER_ID", "metadata.uid"),
        variable("NAME", name),
        _field("ADDRESS", "status.podIP"),
        # The pod's own address: 0.0.0.0 would not accept connections in IPv6-only clusters.
        _field("BIND_ADDRESS", "status.podIP"),
        _field("NODE", "spec.nodeName"),
        variable("NNODES", f"{job.spec.min_nodes}:{job.spec.max_nodes}"),
    ]


def _torchrun(job: ElasticJob, traits: PodTraits) -> list[Json]:
    """Return the number of workers, or its word, for torchrun in a command that runs once."""
    given = job.spec.nproc_per_node
    if traits.launch is Launch.PER_WORKER or given is None:
        return []
    return [variable("NPROC", given)]


def _rendezvous(job: ElasticJob, settings: PodSettings, access: Access) -> list[Json]:
    endpoints = endpoints_of(job, settings.endpoints)
    files = {
        "ETCD_CA_FILE": (CA, access.ca),
        "ETCD_CERT_FILE": (CERT, access.cert),
        "ETCD_KEY_FILE": (KEY, access.key),
        "ETCD_USER_FILE": (USER, access.user),
        "ETCD_PASSWORD_FILE": (PASSWORD, access.password),
    }
    found = [
        variable("ENDPOINTS", ",".join(endpoints)),
        variable("JOB_KEY_FILE", f"{names.ACCESS_PATH}/{JOB_KEY}"),
        *(
            variable(name, f"{names.ACCESS_PATH}/{key}")
            for name, (key, value) in files.items()
            if value is not None
        ),
    ]
    if settings.server_name and endpoints == settings.endpoints:
        found.append(variable("ETCD_SERVER_NAME", settings.server_name))
    return found


def _backend(job: ElasticJob, index: int) -> list[Json]:
    """Return the settings of agents of torch backends, which cannot read them from etcd."""
    if is_steered(job):
        return []
    backend = job.spec.rendezvous.backend
    found = [
        variable("BACKEND", backend.agent_name),
        variable("BOUNDS", encode(agent_params(job)).decode()),
    ]
    if backend is Backend.C10D:
        found.append(variable("STORE_HOST", str(keeps_store(job, index)).lower()))
    return found


def _agent_settings(job: ElasticJob, traits: PodTraits) -> list[Json]:
    return [
        variable("SOCKET", names.SOCKET_PATH),
        variable("LAUNCH", traits.launch.value),
        variable("CONTROL", names.CONTROL_SOCKET_PATH),
        variable("LOG_DIR", names.LOGS_PATH),
        variable("TOTAL_LOG_BYTES", (LOGS_MIB - _SPARE_MIB) * 1024 * 1024),
        variable("KEEP_ROUNDS", KEEP_ROUNDS),
        variable("STOP_GRACE_SECONDS", job.spec.recovery.stop_grace_seconds),
        variable("KEEP_ALIVE_SECONDS", job.spec.rendezvous.keep_alive_seconds),
        variable("WARM_START", job.spec.recovery.warm_start.value),
        variable("WARM_START_MODULES", ",".join(job.spec.recovery.warm_start_modules)),
        variable("HANG_TIMEOUT_SECONDS", job.spec.recovery.hang_timeout_seconds),
        # Always set, even to an empty value, which opens no port: for a Service called
        # elasticjob-health the kubelet would inject a variable of this name.
        variable("HEALTH_PORT", "" if traits.host_network else names.HEALTH_PORT),
    ]


def _probed(traits: PodTraits, keeps_store: bool) -> Json:
    """Return ports and readiness probe: Ready means that launcher and lease exist.

    There is no liveness probe: before restarting a container the kubelet runs its preStop hook, so
    that a node that is merely slow would leave the job.
    """
    if traits.host_network:
        ready = {"exec": {"command": [*AGENT, "ready"]}, "periodSeconds": 5, "timeoutSeconds": 5}
        return {"readinessProbe": ready}
    ports: list[Json] = [{"name": HEALTH_PORT_NAME, "containerPort": names.HEALTH_PORT}]
    if keeps_store:
        ports.append({"name": STORE_PORT_NAME, "containerPort": STORE_PORT})
    return {
        "ports": ports,
        "readinessProbe": {
            "httpGet": {"path": "/ready", "port": HEALTH_PORT_NAME},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
        },
    }


def _confined(settings: PodSettings, traits: PodTraits) -> Json:
    """Return minimal resources and security context, which the restricted Pod Security Standard
    admits."""
    security: Json = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if traits.root:  # otherwise the pod's user, perhaps the only one allowed, or the image's
        security |= {"runAsUser": IMAGE_USER, "runAsGroup": IMAGE_USER}
    return {
        **resources(settings, traits),
        "securityContext": security,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def resources(settings: PodSettings, traits: PodTraits) -> Json:
    """Return the field with the requests and limits of an added container, which keep the pod's
    quality-of-service class; empty if it has none.

    A resource that the pod's spec sets for the whole pod is left to it.
    """
    limited = traits.guaranteed or settings.always_limited
    requests = (
        {"cpu": settings.cpu_limit, "memory": settings.memory_limit}
        if limited
        else {"cpu": settings.cpu, "memory": settings.memory}
    )
    requests = {name: one for name, one in requests.items() if name not in traits.pod_level}
    limits = dict(requests) if limited else {}
    if traits.bounded_disk:
        requests["ephemeral-storage"] = limits["ephemeral-storage"] = f"{LOGS_MIB + _SPARE_MIB}Mi"
    found = {"requests": requests, "limits": limits}
    kept = {kind: amounts for kind, amounts in found.items() if amounts}
    return {"resources": kept} if kept else {}


def _hidden_token(traits: PodTraits) -> list[Json]:
    """Return the mount of an empty volume over the token's path, which hides the token."""
    if not traits.token:
        return []
    return [mount(names.NO_TOKEN_VOLUME, names.TOKEN_PATH) | {"readOnly": True}]


def mount(volume: str, path: str) -> Json:
    """Return the mount of a volume."""
    return {"name": volume, "mountPath": path}


def variable(name: str, value: object) -> Json:
    """Return an environment variable for the agent or the launcher."""
    return {"name": own_variable(name), "value": str(value)}


def _field(name: str, path: str) -> Json:
    return {
        "name": own_variable(name),
        "valueFrom": {"fieldRef": {"fieldPath": path}},
    }
