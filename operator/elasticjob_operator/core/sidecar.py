"""The two containers that are added to a pod, and what they are told.

The variables are those of the agent's settings; the paths are the same in the trainer where both
use them.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_operator.core import names
from elasticjob_operator.core.access import CA, CERT, JOB_KEY, KEY, PASSWORD, USER, Access
from elasticjob_operator.core.backends import (
    STORE_PORT,
    endpoints_of,
    is_steered,
    keeps_store,
    told_bounds,
)
from elasticjob_operator.core.clashes import own_variable
from elasticjob_operator.core.json import Json
from elasticjob_operator.core.workers import workers_per_node
from elasticjob_operator.model.enums import Backend
from elasticjob_operator.model.job import ElasticJob
from elasticjob_rendezvous.core.codec import encode
from elasticjob_rendezvous.core.keys import job_prefix

AGENT = ("python", "-m", "elasticjob_agent")
HEALTH_PORT = 17946
"""Below the range that the kernel gives to connections, and no trainer's custom."""
HEALTH_PORT_NAME = "elasticjob"
STORE_PORT_NAME = "elasticjob-c10d"
IMAGE_USER = 65532

KEEP_ROUNDS = 10
LOGS_MIB = 512
_SPARE_MIB = 64
"""For what workers write beside their logs: error files, progress."""
_MOST_LOG_BYTES = 16 * 1024 * 1024
_LEAST_LOG_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PodSettings:
    """What the operator was told of every job's pods.

    Args:
        pull_secrets: names of Secrets in the job's namespace.
        endpoints: of etcd, with their scheme, as pods reach it.
        cpu, memory: requests and limits of each container that is added.
        server_name: what etcd's certificate must name, when it is not the endpoint's host.
    """

    sidecar_image: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    cpu: str = "500m"
    memory: str = "128Mi"
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class Around:
    """What the user's part of the pod means for ours.

    Args:
        host_network: other pods may hold any fixed port.
        root: the whole pod is to run as root; ours does not.
        token: the containers get the token of the service account; ours do not.
        bounded_disk: the trainer has a limit of local storage, which the kubelet adds up for the
            whole pod: the logs need their share.
    """

    host_network: bool = False
    root: bool = False
    token: bool = False
    bounded_disk: bool = False


def launcher(settings: PodSettings, around: Around) -> Json:
    """The init container that puts the launcher where the trainer finds it."""
    return {
        "name": names.LAUNCHER_CONTAINER,
        **_image(settings),
        "command": [*AGENT, "install-launcher", names.LAUNCHER_PATH],
        **_confined(settings, around),
        "volumeMounts": [mount(names.SHARED_VOLUME, names.SHARED_PATH), *_shield(around)],
    }


def agent(
    job: ElasticJob,
    index: int,
    incarnation: int,
    settings: PodSettings,
    access: Access,
    around: Around,
) -> Json:
    """The native sidecar: it starts before the trainer and ends after it."""
    return {
        "name": names.AGENT_CONTAINER,
        **_image(settings),
        "command": list(AGENT),
        "restartPolicy": "Always",
        "env": [
            *_identity(job, names.pod_name(job.metadata.name, index), incarnation),
            *_rendezvous(job, settings, access),
            *_backend(job, index),
            *_tuning(job, around),
        ],
        **_probed(around, keeps_store(job, index)),
        # Runs at once when the pod is deleted; SIGTERM comes only after the trainer's end.
        "lifecycle": {"preStop": {"exec": {"command": [*AGENT, "leave", "its pod is to end"]}}},
        **_confined(settings, around),
        "volumeMounts": [
            mount(names.SHARED_VOLUME, names.SHARED_PATH),
            mount(names.LOGS_VOLUME, names.LOGS_PATH),
            mount(names.CONTROL_VOLUME, names.CONTROL_PATH),
            mount(names.ACCESS_VOLUME, names.ACCESS_PATH) | {"readOnly": True},
            *_shield(around),
        ],
    }


def max_log_bytes(workers: int) -> int:
    """What each stream of each worker may keep a round, so that all fit into the volume."""
    room = (LOGS_MIB - _SPARE_MIB) * 1024 * 1024 // (2 * workers * KEEP_ROUNDS)
    return max(_LEAST_LOG_BYTES, min(_MOST_LOG_BYTES, room))


def _image(settings: PodSettings) -> Json:
    return {"image": settings.sidecar_image, "imagePullPolicy": settings.pull_policy}


def _identity(job: ElasticJob, name: str, incarnation: int) -> list[Json]:
    metadata = job.metadata
    return [
        variable("PREFIX", job_prefix(metadata.namespace, metadata.uid, incarnation)),
        _field("MEMBER_ID", "metadata.uid"),
        variable("NAME", name),
        _field("ADDRESS", "status.podIP"),
        # The very address, not 0.0.0.0: that would be deaf where pods have IPv6 alone.
        _field("BIND_ADDRESS", "status.podIP"),
        _field("NODE", "spec.nodeName"),
        variable("SLOTS", workers_per_node(job)),
    ]


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
    """What agents cannot read in a rendezvous that takes no word of the operator's."""
    if is_steered(job):
        return []
    backend = job.spec.rendezvous.backend
    found = [
        variable("BACKEND", backend.value),
        variable("BOUNDS", encode(told_bounds(job)).decode()),
    ]
    if backend is Backend.C10D:
        found.append(variable("STORE_HOST", str(keeps_store(job, index)).lower()))
    return found


def _tuning(job: ElasticJob, around: Around) -> list[Json]:
    return [
        variable("SOCKET", names.SOCKET_PATH),
        variable("CONTROL", names.CONTROL_SOCKET_PATH),
        variable("LOG_DIR", names.LOGS_PATH),
        variable("MAX_LOG_BYTES", max_log_bytes(workers_per_node(job))),
        variable("KEEP_ROUNDS", KEEP_ROUNDS),
        variable("STOP_GRACE_SECONDS", job.spec.recovery.stop_grace_seconds),
        variable("KEEP_ALIVE_SECONDS", job.spec.rendezvous.keep_alive_seconds),
        variable("WARM_START", job.spec.recovery.warm_start.value),
        variable("WARM_START_MODULES", ",".join(job.spec.recovery.warm_start_modules)),
        variable("HANG_TIMEOUT_SECONDS", job.spec.recovery.hang_timeout_seconds),
        # Always said, though none is opened where it is empty: a Service called
        # elasticjob-health would make the kubelet say something else.
        variable("HEALTH_PORT", "" if around.host_network else HEALTH_PORT),
    ]


def _probed(around: Around, keeps_store: bool) -> Json:
    """Ready: launcher and lease are there.

    There is no liveness probe: to restart a container the kubelet runs its preStop first, and a
    node that is merely slow would leave the job.
    """
    if around.host_network:
        ready = {"exec": {"command": [*AGENT, "ready"]}, "periodSeconds": 5, "timeoutSeconds": 5}
        return {"readinessProbe": ready}
    ports: list[Json] = [{"name": HEALTH_PORT_NAME, "containerPort": HEALTH_PORT}]
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


def _confined(settings: PodSettings, around: Around) -> Json:
    """Nothing more than they need, so that the strictest namespace lets them in."""
    security: Json = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if around.root:  # else the pod's user, which may be the only one allowed, or the image's
        security |= {"runAsUser": IMAGE_USER, "runAsGroup": IMAGE_USER}
    # Requests equal limits: what the user chose for the pod's class of service stays so.
    amounts = {"cpu": settings.cpu, "memory": settings.memory}
    if around.bounded_disk:
        amounts["ephemeral-storage"] = f"{LOGS_MIB + _SPARE_MIB}Mi"
    return {
        "resources": {"requests": amounts, "limits": dict(amounts)},
        "securityContext": security,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _shield(around: Around) -> list[Json]:
    """An empty folder where the token would be: a mount there keeps it out."""
    if not around.token:
        return []
    return [mount(names.NO_TOKEN_VOLUME, names.TOKEN_PATH) | {"readOnly": True}]


def mount(volume: str, path: str) -> Json:
    """A volume of ours in a container."""
    return {"name": volume, "mountPath": path}


def variable(name: str, value: object) -> Json:
    """How the agent and the launcher are told something."""
    return {"name": own_variable(name), "value": str(value)}


def _field(name: str, path: str) -> Json:
    return {
        "name": own_variable(name),
        "valueFrom": {"fieldRef": {"fieldPath": path}},
    }
