"""Value types of API requests: the known kinds of object, and one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlencode

Json = dict[str, Any]

_METHODS = {"get": "GET", "list": "GET", "create": "POST", "patch": "PATCH", "delete": "DELETE"}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object and its API path. `group` is empty for the core group."""

    group: str
    version: str
    plural: str
    namespaced: bool = True

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
NODES = Kind("", "v1", "nodes", namespaced=False)
LEASES = Kind("coordination.k8s.io", "v1", "leases")
EVENTS = Kind("events.k8s.io", "v1", "events")


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `about` names an object missing from the path, as in a create."""

    verb: str
    kind: Kind
    namespace: str | None
    name: str = ""
    subresource: str = ""
    about: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    accept: str = "application/json"
    body: Json | None = None

    @property
    def path(self) -> str:
        path = self.kind.path(self.namespace, self.name, self.subresource)
        return f"{path}?{urlencode(self.query)}" if self.query else path

    @property
    def method(self) -> str:
        return _METHODS[self.verb]

    @property
    def read_only(self) -> bool:
        return self.method == "GET"

    def __str__(self) -> str:
        named = (self.namespace, self.name or self.about, self.subresource)
        return f"{self.verb} {self.kind.plural} {'/'.join(part for part in named if part)}".strip()
