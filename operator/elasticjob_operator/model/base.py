"""What all models of the API share: camelCase names, strictness, and constrained types."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, model_validator
from pydantic.alias_generators import to_camel

INT32_MAX = 2**31 - 1
"""Kubernetes' own fields of this kind (replicas, seconds) are int32."""


class ApiModel(BaseModel):
    """A part of the API object: camelCase outside, snake_case inside, immutable."""

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
        """Kubernetes drops a null where a field is optional, so that its default applies."""
        if isinstance(document, Mapping):
            return {key: value for key, value in document.items() if value is not None}
        return document


class SpecModel(ApiModel):
    """Written by users: an unknown field is a typo."""

    model_config = ConfigDict(extra="forbid")


class StatusModel(ApiModel):
    """Written by the operator, perhaps a newer one: unknown fields are passed over."""

    model_config = ConfigDict(extra="ignore")


class OpenModel(ApiModel):
    """Kubernetes' own types, of which only some fields are declared: the rest is kept."""

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
"""UTC with whole seconds, as Kubernetes writes times."""

Generation = Annotated[int, Field(json_schema_extra={"format": "int64"})]
"""A revision of the spec, counted by the API server."""
Step = Annotated[int, Field(json_schema_extra={"format": "int64"})]
"""A step as a training script counts: samples or tokens, where it likes."""
Milliseconds = Annotated[int, Field(json_schema_extra={"format": "int64"})]
"""A time that something took: a job may wait for its nodes for more than the 24 days of int32."""
Count = Annotated[int, Field(strict=True, ge=1, le=INT32_MAX)]
NaturalNumber = Annotated[int, Field(strict=True, ge=0, le=INT32_MAX)]
PositiveSeconds = Annotated[int, Field(strict=True, ge=1, le=INT32_MAX)]
Seconds = Annotated[int, Field(strict=True, ge=0, le=INT32_MAX)]
Flag = Annotated[bool, Field(strict=True)]
LABEL = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
"""A DNS label as Kubernetes names containers."""
SUBDOMAIN = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
"""A DNS subdomain as Kubernetes names most objects."""
