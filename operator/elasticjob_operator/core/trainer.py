"""Trainer container of a pod: the user's container, with the launcher in its command."""

from __future__ import annotations

from elasticjob_operator.core import names
from elasticjob_operator.core.clashes import is_inside
from elasticjob_operator.core.command import Wrapped, wrapped
from elasticjob_operator.core.json import Json
from elasticjob_operator.core.nested import Unsafe
from elasticjob_operator.core.refused import TemplateRefused
from elasticjob_operator.core.sidecar import mount, variable
from elasticjob_operator.core.workers import workers_per_node
from elasticjob_operator.model.job import ElasticJob


def command_of(job: ElasticJob) -> Wrapped:
    """Return the command of the trainer container.

    Raises:
        TemplateRefused: a nested launcher cannot be removed from the command.
    """
    container = job.trainer()
    try:
        return wrapped(container.command or (), container.args or (), workers_per_node(job))
    except Unsafe as error:
        at = job.spec.template.spec.containers.index(container)
        raise TemplateRefused.at(("containers", at, "command"), str(error)) from error


def trainer(job: ElasticJob, own: Json, command: Wrapped) -> Json:
    """Return the template's container `own` with its new command and the launcher's variables and
    mounts; all other fields are unchanged."""
    rest = {key: value for key, value in own.items() if key != "args"}
    variables = [
        variable("SOCKET", names.SOCKET_PATH),
        # The default, set explicitly: for a Service called elasticjob-probe the kubelet would
        # inject a variable of this name.
        variable("PROBE_PORT", 0),
        variable("STOP_GRACE_SECONDS", job.spec.recovery.stop_grace_seconds),
    ]
    if path := own.get("terminationMessagePath"):
        variables.append(variable("TERMINATION_LOG", path))
    mounts = [
        mount(names.SHARED_VOLUME, names.SHARED_PATH),
        mount(names.LOGS_VOLUME, names.LOGS_PATH),
    ]
    if needs_shm(own):
        mounts.append(mount(names.SHM_VOLUME, names.SHM_PATH))
    return {
        **rest,
        "command": list(command.command),
        **({"args": list(command.args)} if command.args else {}),
        "env": [*(own.get("env") or ()), *variables],
        "volumeMounts": [*(own.get("volumeMounts") or ()), *mounts],
    }


def needs_shm(own: Json) -> bool:
    """Return True if /dev/shm needs a volume: data loaders need more than the runtime's 64 MiB.
    A mount of the user's takes precedence."""
    mounts = own.get("volumeMounts") or ()
    return not any(is_inside(one.get("mountPath"), names.SHM_PATH) for one in mounts)
