"""Rules of compute resources: names, amounts, and requests against limits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elasticjob_operator.domain.manifests.pod_rules.fields import (
    QUALIFIED_NAME,
    Fault,
    Field,
    quantity,
)

_STANDARD = ("cpu", "memory", "ephemeral-storage")
_OF_POD = ("cpu", "memory")
_HUGE = "hugepages-"


def amount_faults(
    resources: Field, claims: Sequence[str], *, whole_pod: bool = False
) -> Iterator[Fault]:
    """Yield the faults of a container's resources, or of those of the whole pod.

    Args:
        claims: names of the pod's resource claims.
    """
    limits, requests = dict(resources.entries("limits")), dict(resources.entries("requests"))
    for kind in (limits, requests):
        for name, amount in kind.items():
            yield from _name_faults(name, amount, whole_pod)
            yield from _value_faults(name, amount)
    for name, request in requests.items():
        limit = limits.get(name)
        if limit is None:
            if not _may_exceed(name):
                yield resources.child("limits").fault(f"must have {name}: it has a request")
            continue
        wanted, most = quantity(request.value), quantity(limit.value)
        if wanted != most and not _may_exceed(name):
            yield request.fault(f"must equal the limit of {limit.value}; got {request.value}")
        elif wanted > most:
            yield request.fault(f"must be at most the limit of {limit.value}; got {request.value}")
    named = {*limits, *requests}
    if any(name.startswith(_HUGE) for name in named) and not named & set(_OF_POD):
        yield resources.fault("must have cpu or memory beside huge pages")
    yield from _claim_faults(resources, claims, whole_pod)


def _name_faults(name: str, amount: Field, whole_pod: bool) -> Iterator[Fault]:
    if not QUALIFIED_NAME.fits(name):
        yield from QUALIFIED_NAME.faults(amount, name)
    elif whole_pod:
        if name not in _OF_POD and not name.startswith(_HUGE):
            yield amount.fault("must be a resource of a whole pod: cpu, memory or hugepages-<size>")
    elif "/" not in name:
        if name not in _STANDARD and not name.startswith(_HUGE):
            yield amount.fault(
                f"must be {', '.join(_STANDARD)}, hugepages-<size> or a name such as nvidia.com/gpu"
            )
    elif name.startswith("requests."):
        yield amount.fault("must not begin with requests.")


def _value_faults(name: str, amount: Field) -> Iterator[Fault]:
    value = quantity(amount.value)
    if value < 0:
        yield amount.fault(f"must be at least 0; got {amount.value}")
    elif _is_extended(name) and value != int(value):
        yield amount.fault(f"must be an integer: {name} cannot be divided; got {amount.value}")


def _is_extended(name: str) -> bool:
    return "/" in name and "kubernetes.io/" not in name


def _may_exceed(name: str) -> bool:
    """Return True if the limit of a resource may exceed its request."""
    return not _is_extended(name) and not name.startswith(_HUGE)


def _claim_faults(resources: Field, claims: Sequence[str], whole_pod: bool) -> Iterator[Fault]:
    if whole_pod and resources.child("claims").present:
        yield resources.child("claims").fault("must be absent: containers have claims, not pods")
        return
    for claim in resources.items("claims"):
        if claim.child("name").text not in claims:
            known = f"one of {', '.join(claims)}" if claims else "none there"
            yield claim.fault(f"name must be that of an entry of resourceClaims: {known}")
