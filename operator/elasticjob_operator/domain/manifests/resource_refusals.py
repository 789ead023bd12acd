"""Refusals of a pod for the resources of containers that the operator adds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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
_UNSPECIFIED = re.compile(r"failed quota: [^:]{1,253}: must specify ")
_LONGEST_REFUSAL = 1024 * 1024
"""Maximum length of a LimitRange's refusal: one clause per resource and distinct amount. The time
for it is a fraction of a second."""


@dataclass(slots=True)
class _Amounts:
    """Amounts of some containers. A refusal may have a clause for each container: the lookup for a
    clause takes constant time.

    Args:
        count: number of containers.
        values: amounts by `limits` or `requests`, and resource.
        ratios: number of containers with both amounts of a resource, and their largest ratio.
    """

    count: int = 0
    values: dict[tuple[str, str], set[Decimal]] = field(default_factory=dict)
    ratios: dict[str, tuple[int, Decimal]] = field(default_factory=dict)

    @classmethod
    def of(cls, containers: Iterable[Json]) -> _Amounts:
        found = cls()
        for container in containers:
            found.count += 1
            for kind in ("limits", "requests"):
                for resource, text in amounts(container, kind).items():
                    if (value := quantity(text)) is not None:
                        found.values.setdefault((kind, resource), set()).add(value)
            found._add_ratios(container)
        return found

    def _add_ratios(self, container: Json) -> None:
        requests = amounts(container, "requests")
        for resource, text in amounts(container, "limits").items():
            limit = quantity(text)
            least = quantity(requests[resource]) if resource in requests else limit
            if limit and least:
                number, largest = self.ratios.get(resource, (0, Decimal(0)))
                self.ratios[resource] = number + 1, max(largest, limit / least)

    def of_resource(self, kind: str, resource: str) -> set[Decimal]:
        return self.values.get((kind, resource), set())

    def are_within(self, resource: str, bound: Decimal | None) -> bool:
        """Return True if each container has a limit that exceeds its request by this ratio at
        most."""
        number, largest = self.ratios.get(resource, (0, Decimal(0)))
        return bound is not None and number == self.count and largest <= bound


def refuses_added_resources(pod: Json, message: str, fields: Sequence[str]) -> bool:
    """Return True if the API server refuses this pod only for resources that the operator added.

    Validation names the `fields`. A LimitRange's refusal does not name the container: its amounts
    are compared with those in the pod.
    """
    if fields:
        return all(_is_added(pod, field) for field in fields)
    if named := _without_amounts(message):
        return named <= set(RESERVED_NAMES)
    clauses = _clauses(message)
    if not clauses:
        return False
    containers = [*(pod["spec"].get("initContainers") or ()), *pod["spec"]["containers"]]
    own = _Amounts.of(one for one in containers if one["name"] in RESERVED_NAMES)
    agent = _Amounts.of(one for one in containers if one["name"] == AGENT_CONTAINER)
    others = _Amounts.of(one for one in containers if one["name"] not in RESERVED_NAMES)
    return all(
        _is_of_added(found, own, agent, others)
        if found.re is _BOUND
        else found["of"] == "Container"
        and others.are_within(found["resource"], quantity(found["bound"]))
        and own.count > 0
        for found in clauses
    )


def _without_amounts(message: str) -> set[str]:
    """Return the containers without amounts that a ResourceQuota counts, from its refusal
    `failed quota: q: must specify limits.cpu for: a,b; limits.memory for: a`; empty for another."""
    prefix = _FORBIDDEN.match(message)
    at = prefix.end() if prefix else 0
    quota = _UNSPECIFIED.match(message, at)
    if quota is None or len(message) > _LONGEST_REFUSAL:
        return set()
    found: set[str] = set()
    for clause in message[quota.end() :].split("; "):
        _, of, containers = clause.partition(" for: ")
        if not of:
            return set()
        found.update(containers.split(","))
    return found


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


def _is_added(pod: Json, field: str) -> bool:
    found = _FIELD.match(field)
    if found is None:
        return False
    containers = pod["spec"].get(found[1]) or ()
    index = int(found[2])
    return index < len(containers) and containers[index]["name"] in RESERVED_NAMES


def _is_of_added(found: re.Match[str], own: _Amounts, agent: _Amounts, others: _Amounts) -> bool:
    """Return True if an amount beyond a bound is that of an added container, or beyond it only
    with that of the agent, which counts in the sum of the pod."""
    kind, resource = f"{found['kind']}s", found["resource"]
    value, bound = quantity(found["value"]), quantity(found["bound"])
    if found["of"] == "Container":
        return value in own.of_resource(kind, resource) and value not in others.of_resource(
            kind, resource
        )
    if value is None or bound is None or found["side"] != "maximum":
        return False
    return any(value - one <= bound for one in agent.of_resource(kind, resource))
