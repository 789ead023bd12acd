"""Resources of the user's pod: quantities, the quality-of-service class, pod-level resources.

The rules are those of the API server (`ComputePodQOS`), which reads init containers too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal

from elasticjob_operator.domain.json_object import Json

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
