"""Refusals of a pod for the resources of containers that the operator adds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from elasticjob_operator.domain.json_object import Json
from elasticjob_operator.domain.manifests.names import AGENT_CONTAINER
from elasticjob_operator.domain.manifests.resources import amounts, quantity
from elasticjob_operator.model.rules import RESERVED_NAMES

_FIELD = re.compile(r"spec\.(initContainers|containers)\[(\d+)\]\.resources\b")
_FORBIDDEN = re.compile(r'pods "[^"]*" is forbidden: ')
_RESOURCE = r"(?P<resource>[\w./-]{1,253})"
_BOUND = re.compile(
    rf"(?P<side>maximum|minimum) {_RESOURCE} usage per (?P<of>Container|Pod) is "
    r"(?P<bound>[\w.]{1,99}), but (?P<kind>limit|request) is (?P<value>[\w.]{1,99})(?:, |$)"
)
_RATIO = re.compile(
    rf"{_RESOURCE} max limit to request ratio per (?P<of>Container|Pod) is "
    r"(?P<bound>[\w.]{1,99}), but (?:provided ratio is [\d.]{1,99}|"
    r"no (?P<kind>limit|request) is specified or (?P=kind) is 0)(?:, |$)"
)
_LONGEST_REFUSAL = 16 * 1024
"""Maximum length of a LimitRange's refusal: one clause per resource and distinct amount."""


def refuses_added_resources(pod: Json, message: str, fields: Sequence[str]) -> bool:
    """Return True if the API server refuses this pod only for resources that the operator added.

    Validation names the `fields`. A LimitRange's refusal does not name the container: its amounts
    are compared with those in the pod.
    """
    own, others = _containers(pod)
    if fields:
        return all(_is_added(pod, field) for field in fields)
    clauses = _clauses(message)
    return bool(clauses) and all(
        _is_of_added(found, own, others)
        if found.re is _BOUND
        else found["of"] == "Container" and _all_within(found, others) and bool(own)
        for found in clauses
    )


def _clauses(message: str) -> list[re.Match[str]]:
    """Return the clauses of a LimitRange's refusal; none if it has another part or is too long.

    Users choose names that occur in messages: the time must be linear in their length.
    """
    if len(message) > _LONGEST_REFUSAL:
        return []
    prefix = _FORBIDDEN.match(message)
    text = message[prefix.end() :] if prefix else message
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    clauses: list[re.Match[str]] = []
    at = 0
    while at < len(text):
        clause = _BOUND.match(text, at) or _RATIO.match(text, at)
        if clause is None:
            return []
        clauses.append(clause)
        at = clause.end()
    return clauses


def _containers(pod: Json) -> tuple[list[Json], list[Json]]:
    """Return the containers that the operator adds, and the others."""
    found = [*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"]]
    own = [one for one in found if one["name"] in RESERVED_NAMES]
    return own, [one for one in found if one not in own]


def _is_added(pod: Json, field: str) -> bool:
    found = _FIELD.match(field)
    if found is None:
        return False
    containers = pod["spec"].get(found[1]) or ()
    index = int(found[2])
    return index < len(containers) and containers[index]["name"] in RESERVED_NAMES


def _is_of_added(found: re.Match[str], own: list[Json], others: list[Json]) -> bool:
    """Return True if an amount beyond a bound is that of an added container, or beyond it only
    with that of the agent, which counts in the sum of the pod."""
    kind, resource = f"{found['kind']}s", found["resource"]
    value, bound = quantity(found["value"]), quantity(found["bound"])
    if found["of"] == "Container":
        return value in _values(own, kind, resource) - _values(others, kind, resource)
    agent = _values([one for one in own if one["name"] == AGENT_CONTAINER], kind, resource)
    if value is None or bound is None or found["side"] != "maximum":
        return False
    return any(value - one <= bound for one in agent)


def _values(containers: list[Json], kind: str, resource: str) -> set[Decimal]:
    found = (quantity(amounts(one, kind).get(resource, "")) for one in containers)
    return {one for one in found if one is not None}


def _all_within(found: re.Match[str], containers: list[Json]) -> bool:
    """Return True if each container has a limit that exceeds its request by this ratio at most."""
    bound = quantity(found["bound"])
    for container in containers:
        limit = quantity(amounts(container, "limits").get(found["resource"], ""))
        request = amounts(container, "requests").get(found["resource"])
        least = limit if request is None else quantity(request)
        if not limit or not least or bound is None or limit / least > bound:
            return False
    return True
