"""Parser from a document to an ElasticJob, or to the list of all its problems."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from elasticjob_operator.model.base import INT32_MAX
from elasticjob_operator.model.faults import first_of_each, problems
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.problems import InvalidManifest, Location, Problem
from elasticjob_operator.model.rules import RULES

_PASSES = 4
"""Maximum number of attempts to replace faulty fields before the rules are checked: one fault may
hide another."""


def parse_manifest(document: Mapping[str, Any]) -> ElasticJob:
    """Return the job that a document describes.

    Raises:
        InvalidManifest: the document has problems; lists all, including broken rules between
            fields.
    """
    if not isinstance(document, Mapping):
        raise InvalidManifest([Problem.at((), "must be a mapping with apiVersion, kind and spec")])
    try:
        job = _validate(document)
    except ValidationError as error:
        faults = problems(error, document)
        broken = _broken_rules(_without(document, faults))
        raise InvalidManifest(first_of_each([*faults, *_apart(broken, faults)])) from error
    broken = _broken_rules(document)
    if broken:
        raise InvalidManifest(first_of_each(broken))
    return job


def _validate(document: Mapping[str, Any]) -> ElasticJob:
    # by_name=False: a manifest is camelCase only; min_nodes is a typo there.
    return ElasticJob.model_validate(document, by_alias=True, by_name=False)


def _broken_rules(document: Mapping[str, Any] | None) -> list[Problem]:
    """Return the broken rules; none for a document whose faults could not be replaced."""
    if document is None:
        return []
    return [
        Problem.at(("spec", *location), rule.message)
        for rule in RULES
        for location in rule.check(document["spec"])
    ]


def _apart(broken: Iterable[Problem], faults: Iterable[Problem]) -> list[Problem]:
    """Return the broken rules that are not an effect of a faulty field."""
    faulty = [fault.location for fault in faults]
    return [rule for rule in broken if not any(_nested(rule.location, at) for at in faulty)]


def _nested(one: Location, other: Location) -> bool:
    shared = min(len(one), len(other))
    return one[:shared] == other[:shared]


def _without(document: Mapping[str, Any], faults: list[Problem]) -> dict[str, Any] | None:
    """Return a copy with stand-ins for faulty fields, so that the rules can check the rest; None
    if faults remain."""
    sound = copy.deepcopy(dict(document))
    for _ in range(_PASSES):
        for fault in reversed(faults):
            _put_aside(sound, fault.location)
        try:
            _validate(sound)
        except ValidationError as error:
            faults = problems(error, sound)
        else:
            return sound
    return None


def _put_aside(document: Any, location: Location) -> None:
    holder = document
    for step in location[:-1]:
        try:
            holder = holder[step]
        except (KeyError, IndexError, TypeError):
            return
    last = location[-1]
    stand_in = _stand_in(location)
    if isinstance(holder, dict):
        holder.pop(last, None)
        if stand_in is not None:
            holder[last] = stand_in
    elif isinstance(holder, list) and isinstance(last, int) and last < len(holder):
        # In a list the indices of the other items must stay, or their problems would be misplaced.
        if stand_in is None:
            del holder[last]
        else:
            holder[last] = stand_in


def _stand_in(location: Location) -> Any:
    match location:
        case ("apiVersion",):
            return "elasticjob.dev/v1alpha1"
        case ("kind",):
            return "ElasticJob"
        case ("metadata",):
            return {"name": "stand-in"}
        case ("metadata", "name"):
            return "stand-in"
        case ("spec",):
            return {}
        case ("spec", "maxNodes"):
            return INT32_MAX
        case (*_, "containers" | "initContainers", int() as index):
            return {"name": f"stand-in-{index}", "command": ["true"]}
        case (*_, "containers" | "initContainers", int() as index, "name"):
            return f"stand-in-{index}"
        case (*_, "containers"):
            return [{"name": "stand-in", "command": ["true"]}]
        case ("spec", "template") | ("spec", "template", "spec"):
            return {}
        case (*_, "env", int() as index):
            return {"name": f"STAND_IN_{index}"}
        case (*_, "env", int() as index, "name"):
            return f"STAND_IN_{index}"
    return None
