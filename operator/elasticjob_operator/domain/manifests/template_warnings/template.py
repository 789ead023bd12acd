"""Template of a job as the rules for its warnings read it, and the kinds of warnings.

Fields of an unexpected type, which the API server refuses, are read as empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from elasticjob_operator.domain.json_object import Json
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.problems import Location


class WarningKind(StrEnum):
    """Kind of a warning; the reason of its event and in the condition `TemplateWarnings`."""

    ACCELERATORS_NOT_REQUESTED = "AcceleratorsNotRequested"
    ENVIRONMENT_CLEARED = "EnvironmentCleared"
    FLOATING_IMAGE = "FloatingImage"
    FRACTIONAL_BYTES = "FractionalBytes"
    GRACE_TOO_SHORT = "GraceTooShort"
    HOST_IPC = "HostIPC"
    HOST_PATH_PER_MACHINE = "HostPathPerMachine"
    HOST_PORT = "HostPort"
    LABEL_REPLACED = "LabelReplaced"
    LIVENESS_PROBE = "LivenessProbe"
    MEMORY_VOLUME_WITHOUT_LIMIT = "MemoryVolumeWithoutLimit"
    POD_DEADLINE = "PodDeadline"
    PRE_STOP_TOO_LONG = "PreStopTooLong"
    READINESS_GATES = "ReadinessGates"
    READINESS_PROBE = "ReadinessProbe"
    SCHEDULER_WITHOUT_QUEUE = "SchedulerWithoutQueue"
    SELECTOR_MISSING = "SelectorMissing"
    SNAPSHOT_MEMORY = "SnapshotMemory"
    UNKNOWN_CAPABILITY = "UnknownCapability"
    VARIABLE_REPLACED = "VariableReplaced"


@dataclass(frozen=True, slots=True)
class Template:
    """Template as plain values. Locations are relative to the pod's spec."""

    job: ElasticJob
    metadata: Json
    spec: Json
    trainer: Json
    at: Location

    @property
    def several(self) -> bool:
        """True if two of the job's pods can run at once."""
        return self.job.spec.max_nodes > 1


Found = tuple[WarningKind, Location, str]
"""Kind, location and message of a warning; `..` leads out of the pod's spec."""
Rule = Callable[[Template], Iterable[Found]]


def mapping(value: Any) -> Json:
    """Return a field that should be a mapping; empty if it is not."""
    return value if isinstance(value, dict) else {}


def mappings(value: Any) -> list[Json]:
    """Return a field that should be a list of mappings; empty if it is not."""
    return [mapping(one) for one in value] if isinstance(value, list) else []


def containers(spec: Json) -> Iterator[tuple[Location, Json]]:
    """Yield all containers of a pod with their locations; init containers come first."""
    for kind in ("initContainers", "containers"):
        for index, container in enumerate(mappings(spec.get(kind))):
            yield (kind, index), container


UNREADY = (
    "until they pass the job's PodsReady is False and its PodDisruptionBudget does not protect "
    "the pod"
)
"""Effect of a pod that is not ready."""
