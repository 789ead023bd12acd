"""The pod template: Kubernetes' PodTemplateSpec, of which only what we read is declared.

Everything else is kept as it is; the API server validates it when the pods are made.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from elasticjob_operator.model.base import LABEL, OpenModel, Seconds
from elasticjob_operator.model.enums import RestartPolicy

MAX_CONTAINERS = 16
"""A bound that keeps the API server's cost estimate of our CEL rules within its limit."""


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
    """Its value, a string."""


class Resources(OpenModel):
    """Compute resources of a container."""

    limits: dict[str, Quantity] | None = None
    """The most it may use. GPUs are asked for here."""
    requests: dict[str, Quantity] | None = None
    """What is reserved for it."""


class Container(OpenModel):
    """A container of the pod template. Fields not declared here are kept."""

    name: Annotated[str, Field(pattern=LABEL, min_length=1, max_length=63)]
    """A DNS label, unique in the pod."""
    image: str | None = None
    """Image to run."""
    command: list[str] | None = None
    """Entry point. The trainer container must set it: the image's own is not known here."""
    args: list[str] | None = None
    """Arguments of the command."""
    working_dir: str | None = None
    """Directory the command starts in."""
    env: list[EnvVar] | None = None
    """Environment variables."""
    resources: Resources | None = None
    """Compute resources."""


class PodSpec(OpenModel):
    """The pod's spec. Fields not declared here are kept."""

    containers: Annotated[list[Container], Field(min_length=1, max_length=MAX_CONTAINERS)]
    """The pod's containers, one of them the trainer."""
    init_containers: Annotated[list[Container], Field(max_length=MAX_CONTAINERS)] | None = None
    """Containers that run before them."""
    restart_policy: RestartPolicy | None = None
    """Must be absent or Never: the job restarts workers itself, the kubelet must not."""
    termination_grace_period_seconds: Seconds | None = None
    """Seconds between a pod's deletion and its end."""


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
    """The pod's spec."""
