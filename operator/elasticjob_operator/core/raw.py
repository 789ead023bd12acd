"""Access to undeclared fields of a template, whose types are unchecked."""

from __future__ import annotations

from typing import Any

from elasticjob_operator.core.json import Json
from elasticjob_operator.core.refused import TemplateRefused
from elasticjob_operator.model.problems import Location


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
