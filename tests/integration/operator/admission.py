"""Admission policies of the API server for the objects in a test's namespace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.integration.operator_rig import Json, Namespace

GROUP = "admissionregistration.k8s.io/v1"


def rule(group: str, plural: str, operation: str) -> Json:
    return {
        "apiGroups": [group],
        "apiVersions": ["*"],
        "operations": [operation],
        "resources": [plural],
    }


@contextmanager
def admission_policy(ns: Namespace, kind: str, where: Json, **spec: Any) -> Iterator[None]:
    """Register a policy, `Mutating` or `Validating`, for the duration of the block. The API server
    applies and drops it a moment later."""
    policies = f"/apis/{GROUP}/{kind.lower()}admissionpolicies"
    bindings = f"/apis/{GROUP}/{kind.lower()}admissionpolicybindings"
    constraints = {
        "resourceRules": [where],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": ns.name}},
    }
    common = {"apiVersion": GROUP, "metadata": {"name": ns.name}}
    body = {"matchConstraints": constraints, "failurePolicy": "Fail", **spec}
    ns.server.request("POST", policies, {**common, "kind": f"{kind}AdmissionPolicy", "spec": body})
    bound: Json = {"policyName": ns.name}
    if kind == "Validating":
        bound["validationActions"] = ["Deny"]
    try:
        binding = {**common, "kind": f"{kind}AdmissionPolicyBinding", "spec": bound}
        ns.server.request("POST", bindings, binding)
        yield
    finally:
        ns.server.request("DELETE", f"{bindings}/{ns.name}")
        ns.server.request("DELETE", f"{policies}/{ns.name}")


def patching(*patches: str) -> dict[str, Any]:
    """Return the fields of a mutating policy that applies these JSON patches."""
    expression = f"[{', '.join(patches)}]"
    return {
        "reinvocationPolicy": "Never",
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": expression}}],
    }
