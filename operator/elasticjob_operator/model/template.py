"""Pod template: Kubernetes' PodTemplateSpec, with only the fields declared that are read here.

All other fields are kept; the API server validates them when pods are created.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from elasticjob_operator.model.base import LABEL, OpenModel, Seconds
from elasticjob_operator.model.enums import RestartPolicy

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
