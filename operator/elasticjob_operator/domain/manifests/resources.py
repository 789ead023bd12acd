"""Resources of a pod: quantities, the quality-of-service class, pod-level resources, and refusals
of those that the operator adds.

The rules are those of the API server (`ComputePodQOS`), which reads init containers too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from decimal import Decimal

from elasticjob_operator.domain.json_object import Json
from elasticjob_operator.domain.manifests.names import AGENT_CONTAINER
from elasticjob_operator.model.rules import RESERVED_NAMES

_QUANTITY = re.compile(
    r"(?P<number>[+-]?(\d+(\.\d*)?|\.\d+))(?P<suffix>[numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?"
)
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_COMPUTE = ("cpu", "memory")


def quantity(value: object) -> Decimal | None:
    """Return the number that a Kubernetes quantity stands for; None if it is not a quantity."""
    found = _QUANTITY.fullmatch(str(value))
    if found is None:
        return None
    number, suffix = Decimal(found["number"]), found["suffix"] or ""
    if suffix in _DECIMAL:
        return number.scaleb(_DECIMAL[suffix])
    if suffix in _BINARY:
        return number * (1 << _BINARY[suffix])
    return number.scaleb(int(suffix[1:])) if suffix and len(suffix) < 6 else number


def amounts(holder: Json, kind: str) -> Json:
    """Return `resources.limits` or `resources.requests` of a container or a pod's spec; empty if
    absent or of another type, which the API server refuses."""
    resources = holder.get("resources")
    found = resources.get(kind) if isinstance(resources, dict) else None
    return found if isinstance(found, dict) else {}


def requests_devices(container: Json) -> bool:
    """Return True if a container requests an extended resource, such as a GPU, or has a claim."""
    found = {**amounts(container, "requests"), **amounts(container, "limits")}
    resources = container.get("resources")
    claims = resources.get("claims") if isinstance(resources, dict) else None
    return bool(claims) or any("/" in name and quantity(value) for name, value in found.items())


def pod_level(spec: Json) -> frozenset[str]:
    """Return the names of the resources that the pod's spec sets for the pod as a whole."""
    return frozenset((*amounts(spec, "requests"), *amounts(spec, "limits")))


def is_guaranteed(containers: Iterable[Json]) -> bool:
    """Return True if each container, of at least one, has limits of CPU and memory and equal
    requests. Absent requests default to the limits."""
    found = list(containers)
    return bool(found) and all(
        _is_equal(container, name) for container in found for name in _COMPUTE
    )


def _is_equal(container: Json, name: str) -> bool:
    limit = quantity(amounts(container, "limits").get(name))
    request = amounts(container, "requests").get(name)
    return bool(limit) and (request is None or quantity(request) == limit)


_FIELD = re.compile(r"spec\.(initContainers|containers)\[(\d+)\]\.resources\b")
_BOUND = re.compile(
    r"(?P<side>maximum|minimum) (?P<resource>\S+) usage per (?P<of>Container|Pod) is "
    r"(?P<bound>[\w.]+), but (?P<kind>limit|request) is (?P<value>[\w.]+)"
)
_RATIO = re.compile(
    r"(?P<resource>\S+) max limit to request ratio per (?P<of>Container|Pod) is (?P<bound>[\w.]+), "
    r"but (?:provided ratio|no limit|no request)"
)


def refuses_added_resources(pod: Json, message: str, fields: Sequence[str]) -> bool:
    """Return True if the API server refuses this pod only for resources that the operator added.

    Validation names the `fields`. A LimitRange's refusal does not name the container: its amounts
    are compared with those in the pod.
    """
    own, others = _containers(pod)
    if fields:
        return all(_is_added(pod, field) for field in fields)
    bounds, ratios = list(_BOUND.finditer(message)), list(_RATIO.finditer(message))
    return (
        bool(bounds or ratios)
        and all(_is_of_added(found, own, others) for found in bounds)
        and all(
            found["of"] == "Container" and _all_within(found, others) and bool(own)
            for found in ratios
        )
    )


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
