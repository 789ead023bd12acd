"""Kinds of objects in the API, and the form of an object. Loads no client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of object and its API path.

    `group` is empty for the core group, `singular` if it is `plural` without its last letter.
    """

    group: str
    version: str
    plural: str
    namespaced: bool = True
    singular: str = ""

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Return the path of an object or collection; None stands for all namespaces, or none."""
        root = f"/apis/{self.group}" if self.group else "/api"
        steps = [root, self.version]
        if namespace is not None and self.namespaced:
            steps += ["namespaces", namespace]
        steps += [self.plural, name, subresource]
        return "/".join(step for step in steps if step)


ELASTICJOBS = Kind("elasticjob.dev", "v1alpha1", "elasticjobs")
PODS = Kind("", "v1", "pods")
SERVICES = Kind("", "v1", "services")
SECRETS = Kind("", "v1", "secrets")
NAMESPACES = Kind("", "v1", "namespaces", namespaced=False)
BUDGETS = Kind("policy", "v1", "poddisruptionbudgets")
NETWORK_POLICIES = Kind("networking.k8s.io", "v1", "networkpolicies", singular="networkpolicy")
NODES = Kind("", "v1", "nodes", namespaced=False)
LEASES = Kind("coordination.k8s.io", "v1", "leases")
EVENTS = Kind("events.k8s.io", "v1", "events")
