"""Rules of tolerations, affinity and topology spread."""

from __future__ import annotations

from collections.abc import Iterator

from elasticjob_operator.domain.manifests.pod_rules.fields import (
    DNS_LABEL,
    DNS_SUBDOMAIN,
    LABEL_VALUE,
    QUALIFIED_NAME,
    Fault,
    Field,
    in_range,
)

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def placement_faults(spec: Field) -> Iterator[Fault]:
    for toleration in spec.items("tolerations"):
        yield from _toleration_faults(toleration)
    yield from _node_affinity_faults(spec.child("affinity", "nodeAffinity"))
    for kind in ("podAffinity", "podAntiAffinity"):
        affinity = spec.child("affinity", kind)
        for term in affinity.items(_REQUIRED):
            yield from _pod_term_faults(term)
        for preferred in affinity.items(_PREFERRED):
            yield from in_range(preferred.child("weight"), 1, 100)
            yield from _pod_term_faults(preferred.child("podAffinityTerm"))
    for constraint in spec.items("topologySpreadConstraints"):
        yield from _spread_faults(constraint)


def _toleration_faults(toleration: Field) -> Iterator[Fault]:
    key, value, operator = (toleration.child(name) for name in ("key", "value", "operator"))
    if key.value:
        yield from QUALIFIED_NAME.faults(key)
    elif operator.value != "Exists":
        yield operator.fault("must be Exists without a key: the toleration then fits every taint")
    if toleration.child("tolerationSeconds").present:
        effect = toleration.child("effect")
        if effect.value != "NoExecute":
            yield effect.fault("must be NoExecute with tolerationSeconds")
    if operator.value == "Exists":
        if value.value:
            yield operator.fault("must not be Exists with a value")
    elif operator.value in ("Lt", "Gt"):
        yield operator.fault("must be Equal or Exists: the comparisons are off by default")
    elif not LABEL_VALUE.fits(value.text):
        yield from ((operator.location, message) for _, message in LABEL_VALUE.faults(value))


def _node_affinity_faults(affinity: Field) -> Iterator[Fault]:
    required = affinity.child(_REQUIRED)
    if required.present and not required.child("nodeSelectorTerms").value:
        yield required.child("nodeSelectorTerms").fault("must hold at least 1 entry")
    for term in required.items("nodeSelectorTerms"):
        yield from _node_term_faults(term, strict=True)
    for preferred in affinity.items(_PREFERRED):
        yield from in_range(preferred.child("weight"), 1, 100)
        yield from _node_term_faults(preferred.child("preference"), strict=False)


def _node_term_faults(term: Field, *, strict: bool) -> Iterator[Fault]:
    for expression in term.items("matchExpressions"):
        yield from _expression_faults(expression)
        yield from QUALIFIED_NAME.faults(expression.child("key"))
        if strict:
            for value in expression.items("values"):
                yield from LABEL_VALUE.faults(value)
    for field in term.items("matchFields"):
        if field.child("operator").value not in ("In", "NotIn"):
            yield field.child("operator").fault("must be In or NotIn for a field")
        elif len(field.items("values")) != 1:
            yield field.child("values").fault("must hold exactly 1 entry for a field")
        if field.child("key").value != "metadata.name":
            yield field.child("key").fault("must be metadata.name")
        for value in field.items("values"):
            yield from DNS_SUBDOMAIN.faults(value)


def _expression_faults(expression: Field) -> Iterator[Fault]:
    """Yield a fault if the number of values does not fit the operator."""
    operator, values = expression.child("operator"), expression.child("values")
    count = len(values.value or ())
    match operator.value:
        case "In" | "NotIn" if not count:
            yield values.fault(f"must be set with operator {operator.value}")
        case "Exists" | "DoesNotExist" if count:
            yield values.fault(f"must be absent with operator {operator.value}")
        case "Gt" | "Lt" if count != 1:
            yield values.fault(f"must hold exactly 1 entry with operator {operator.value}")
        case "In" | "NotIn" | "Exists" | "DoesNotExist" | "Gt" | "Lt":
            return
        case other:
            yield operator.fault(f"must be In, NotIn, Exists or DoesNotExist; got {other!r}")


def _selector_faults(selector: Field) -> Iterator[Fault]:
    for label, value in selector.entries("matchLabels"):
        yield from QUALIFIED_NAME.faults(value, label)
        yield from LABEL_VALUE.faults(value)
    for expression in selector.items("matchExpressions"):
        if expression.child("operator").value in ("Gt", "Lt"):
            yield expression.child("operator").fault(
                "must be In, NotIn, Exists or DoesNotExist: labels of pods have no order"
            )
        else:
            yield from _expression_faults(expression)
        yield from QUALIFIED_NAME.faults(expression.child("key"))
        for value in expression.items("values"):
            yield from LABEL_VALUE.faults(value)


def _label_key_faults(holder: Field, *names: str) -> Iterator[Fault]:
    for name in names:
        keys = holder.child(name)
        if keys.value and not holder.child("labelSelector").present:
            yield keys.fault("must be absent without labelSelector")


def _pod_term_faults(term: Field) -> Iterator[Fault]:
    yield from _label_key_faults(term, "matchLabelKeys", "mismatchLabelKeys")
    yield from QUALIFIED_NAME.faults(term.child("topologyKey"))
    yield from _selector_faults(term.child("labelSelector"))
    yield from _selector_faults(term.child("namespaceSelector"))
    for namespace in term.items("namespaces"):
        yield from DNS_LABEL.faults(namespace)


def _spread_faults(constraint: Field) -> Iterator[Fault]:
    yield from in_range(constraint.child("maxSkew"), 1, 2**31 - 1)
    if not constraint.child("topologyKey").value:
        yield constraint.child("topologyKey").fault("must be set")
    yield from _label_key_faults(constraint, "matchLabelKeys")
    domains = constraint.child("minDomains")
    yield from in_range(domains, 1, 2**31 - 1)
    if domains.present and constraint.child("whenUnsatisfiable").value != "DoNotSchedule":
        yield domains.fault("must be absent unless whenUnsatisfiable is DoNotSchedule")
    yield from _selector_faults(constraint.child("labelSelector"))
