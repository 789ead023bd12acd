"""The container that trains, as it is in the pod: the user's, with the launcher in front."""

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
    """What the trainer container runs. Raises `TemplateRefused`."""
    container = job.trainer()
    try:
        return wrapped(container.command or (), container.args or (), workers_per_node(job))
    except Unsafe as error:
        at = job.spec.template.spec.containers.index(container)
        raise TemplateRefused.at(("containers", at, "command"), str(error)) from error


def trainer(job: ElasticJob, own: Json, command: Wrapped) -> Json:
    """The container `own` of the template with its new command, the launcher's variables and
    mounts; everything else stays as it was written."""
    rest = {key: value for key, value in own.items() if key != "args"}
    variables = [
        variable("SOCKET", names.SOCKET_PATH),
        # Its default, said because a Service called elasticjob-probe would say something else.
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
    """Data loaders want more than a runtime's 64 MiB; who mounts something there knows better."""
    mounts = own.get("volumeMounts") or ()
    return not any(is_inside(one.get("mountPath"), names.SHM_PATH) for one in mounts)
