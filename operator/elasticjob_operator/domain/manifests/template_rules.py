"""Rules of the pod template: fields, names and paths that the operator sets in every pod.

`pod_rules` has the rules of the API server itself. The models do not check the types of undeclared
fields: `mapping` and `mappings` read them, or raise `TemplateRefused`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elasticjob_operator.domain.json_object import Json
from elasticjob_operator.domain.manifests.names import (
    LOGS_PATH,
    RESERVED_VOLUMES,
    SHARED_PATH,
    SNAPSHOTS_PATH,
    STORAGE_PATH,
)
from elasticjob_operator.model.problems import Location, Problem
from elasticjob_rendezvous.protocol.text import echoed

POD_SPEC: Location = ("spec", "template", "spec")


class TemplateRefused(ValueError):
    """Template from which no pod can be made; `problem` names the field and the fix."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem

    @classmethod
    def at(cls, location: Location, message: str) -> TemplateRefused:
        """Return the error for a field; `location` is relative to the pod's spec."""
        return cls(Problem.at((*POD_SPEC, *location), message))


def mapping(holder: Json, name: str, location: Location) -> Json:
    """Return a field that must be a mapping; empty if absent. `location` is the holder's."""
    value = holder.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise TemplateRefused.at((*location, name), "must be a mapping")
    return value


def mappings(holder: Json, name: str, location: Location) -> list[Json]:
    """Return a field that must be a list of mappings; empty if absent."""
    value: Any = holder.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise TemplateRefused.at((*location, name), "must be a list")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise TemplateRefused.at((*location, name, index), "must be a mapping")
    return list(value)


OWN_VARIABLES = "ELASTICJOB_"
NESTED_LAUNCH = "ELASTICJOB_NESTED_LAUNCH"
NESTED_LAUNCHES = ("refuse", "allow")
USERS_VARIABLES = frozenset(
    {"ELASTICJOB_SAVE_SIGNAL", "ELASTICJOB_STANDBY_SECONDS", "ELASTICJOB_STANDBY_MIB"}
    | {"ELASTICJOB_COUNT_SECONDS", NESTED_LAUNCH, "ELASTICJOB_TOPOLOGY_DOMAIN"}
)
"""Variables with this prefix that users may set."""
_EVERY_POD = {
    "hostname": "must be absent: every pod is named after its index",
    "subdomain": "must be absent: it is the job's Service",
}
_TRAINER = {
    "restartPolicy": "must be absent: the job restarts workers itself, the kubelet must not",
    "restartPolicyRules": "must be absent: the job restarts workers itself, the kubelet must not",
}


_OWN_PATHS = {
    SHARED_PATH: "the launcher is",
    LOGS_PATH: "the launcher is",
    SNAPSHOTS_PATH: "snapshots are",
    STORAGE_PATH: "snapshots are",
}


def own_variable(name: str) -> str:
    """Return the full name of a variable in the agent's and the launcher's environment."""
    return f"{OWN_VARIABLES}{name}"


def check_template(spec: Json, trainer: str) -> None:
    """Raise `TemplateRefused` if a pod's spec conflicts with the operator's additions."""
    for refused in conflicts(spec, trainer):
        raise refused


def conflicts(spec: Json, trainer: str) -> Iterator[TemplateRefused]:
    """Yield the conflicts of a pod's spec with the operator's additions.

    Raises:
        TemplateRefused: a field that must be a mapping or a list is neither.
    """
    for name, message in _EVERY_POD.items():
        if spec.get(name):
            yield TemplateRefused.at((name,), message)
    for index, volume in enumerate(mappings(spec, "volumes", ())):
        yield from _name_conflicts(volume.get("name"), ("volumes", index, "name"))
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(mappings(spec, kind, ())):
            yield from _container_conflicts(container, (kind, index))
            if kind == "containers" and container.get("name") == trainer:
                yield from _trainer_conflicts(container, (kind, index))


def _container_conflicts(container: Json, location: Location) -> Iterator[TemplateRefused]:
    """Yield mounts of the operator's volumes: naming its volume would expose the Secret."""
    for field in ("volumeMounts", "volumeDevices"):
        for index, mount in enumerate(mappings(container, field, location)):
            yield from _name_conflicts(mount.get("name"), (*location, field, index, "name"))


def _trainer_conflicts(trainer: Json, location: Location) -> Iterator[TemplateRefused]:
    for name, message in _TRAINER.items():
        if trainer.get(name):
            yield TemplateRefused.at((*location, name), message)
    for index, variable in enumerate(mappings(trainer, "env", location)):
        name = str(variable.get("name"))
        if name.startswith(OWN_VARIABLES) and name not in USERS_VARIABLES:
            yield TemplateRefused.at(
                (*location, "env", index, "name"),
                f"must not begin with {OWN_VARIABLES}: these variables are set for the launcher",
            )
        value = str(variable.get("value") or "")
        is_literal = value and "$(" not in value
        if name == NESTED_LAUNCH and is_literal and value not in NESTED_LAUNCHES:
            yield TemplateRefused.at(
                (*location, "env", index, "value"),
                f"must be {' or '.join(NESTED_LAUNCHES)}; got {echoed(value)}",
            )
    for index, mount in enumerate(mappings(trainer, "volumeMounts", location)):
        for path, what in _OWN_PATHS.items():
            if is_inside(mount.get("mountPath"), path):
                yield TemplateRefused.at(
                    (*location, "volumeMounts", index, "mountPath"),
                    f"must not be {path} or below it: {what} there",
                )


def _name_conflicts(name: object, location: Location) -> Iterator[TemplateRefused]:
    if name in RESERVED_VOLUMES:
        yield TemplateRefused.at(location, f"must not be {name}: this volume is added to the pod")


def is_inside(path: object, folder: str) -> bool:
    """Return True if a mount path is this folder or below it, in any spelling."""
    wanted = _parts(folder)
    return _parts(path)[: len(wanted)] == wanted


def is_same(path: object, folder: str) -> bool:
    """Return True if a mount path is this folder, in any spelling."""
    return _parts(path) == _parts(folder)


def _parts(path: object) -> list[str]:
    return [part for part in str(path).split("/") if part not in ("", ".")]
