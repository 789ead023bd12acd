"""Types of the API's fields: base models, constrained types, and the enumerations of `enums`.

Base models use camelCase names in documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    model_validator,
)
from pydantic.alias_generators import to_camel

from elasticjob_operator.enums import (
    MAX_NODES as MAX_NODES,
)
from elasticjob_operator.enums import (
    Backend as Backend,
)
from elasticjob_operator.enums import (
    CleanPodPolicy as CleanPodPolicy,
)
from elasticjob_operator.enums import (
    ConditionStatus as ConditionStatus,
)
from elasticjob_operator.enums import (
    ConditionType as ConditionType,
)
from elasticjob_operator.enums import (
    Launch as Launch,
)
from elasticjob_operator.enums import (
    LaunchReason as LaunchReason,
)
from elasticjob_operator.enums import (
    Phase as Phase,
)
from elasticjob_operator.enums import (
    RendezvousState as RendezvousState,
)
from elasticjob_operator.enums import (
    ReplicaState as ReplicaState,
)
from elasticjob_operator.enums import (
    RestartPolicy as RestartPolicy,
)
from elasticjob_operator.enums import (
    ScaleUp as ScaleUp,
)
from elasticjob_operator.enums import (
    WarmStart as WarmStart,
)

INT32_MAX = 2**31 - 1
"""Maximum of integer fields: Kubernetes' own fields of this kind (replicas, seconds) are int32."""
MAX_SECONDS = 315_360_000
"""Maximum duration in seconds: ten years."""
MAX_ARGUMENT = 131_072
"""Maximum length of one argument or variable of a process on Linux, in bytes."""
MAX_ENTRIES = 4096
"""Maximum number of arguments of a command."""
MAX_KEYS = 256
"""Maximum number of labels, annotations or kinds of resources."""


class ApiModel(BaseModel):
    """Part of the API object: camelCase in documents, snake_case in Python, immutable."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
        frozen=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, document: Any) -> Any:
        """Drop nulls, as Kubernetes does for optional fields, so that defaults apply."""
        if isinstance(document, Mapping):
            return {key: value for key, value in document.items() if value is not None}
        return document


class SpecModel(ApiModel):
    """Model written by users: an unknown field is an error."""

    model_config = ConfigDict(extra="forbid")


class StatusModel(ApiModel):
    """Model written by the operator, perhaps a newer one: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


class OpenModel(ApiModel):
    """Kubernetes type of which only some fields are declared: all others are kept."""

    model_config = ConfigDict(extra="allow")


def _whole_seconds(moment: datetime) -> datetime:
    utc = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return utc.replace(microsecond=0)


def _rfc3339(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")


Timestamp = Annotated[
    datetime,
    AfterValidator(_whole_seconds),
    PlainSerializer(_rfc3339, return_type=str, when_used="always"),
]
"""Time in UTC with whole seconds, as Kubernetes writes it."""

Generation = Annotated[int, Field(json_schema_extra={"format": "int64"})]
"""Revision of the spec, counted by the API server."""
Step = Annotated[int, Field(json_schema_extra={"format": "int64"})]
"""Step as counted by a training script, perhaps in samples or tokens: exceeds int32."""
Milliseconds = Annotated[int, Field(json_schema_extra={"format": "int64"})]
"""Duration in milliseconds: a job may wait for its nodes longer than the 24 days of int32."""
Nodes = Annotated[int, Field(strict=True, ge=1, le=MAX_NODES)]
ScaledNodes = Annotated[int, Field(strict=True, ge=0, le=MAX_NODES)]
NaturalNumber = Annotated[int, Field(strict=True, ge=0, le=INT32_MAX)]
PositiveSeconds = Annotated[int, Field(strict=True, ge=1, le=MAX_SECONDS)]
SecondsOfADay = Annotated[int, Field(strict=True, ge=1, le=86400)]
"""Interval of at most a day, as `elasticjob.train.Snapshots` accepts it."""
Seconds = Annotated[int, Field(strict=True, ge=0, le=MAX_SECONDS)]
Argument = Annotated[str, Field(max_length=MAX_ARGUMENT)]
ShortText = Annotated[str, Field(max_length=4096)]
Flag = Annotated[bool, Field(strict=True)]
SET: dict[str, JsonValue] = {"x-kubernetes-list-type": "set"}
"""Schema of a list whose entries are unique, so that several appliers may each own some."""


def by(key: str) -> dict[str, JsonValue]:
    """Return the schema of a list of objects with this unique field."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}


LABEL = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
"""Pattern of a DNS label, such as a container's name."""
SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
"""Pattern of a DNS subdomain, such as the name of most objects."""
