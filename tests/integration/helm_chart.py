"""Helm chart as users render it: the pinned helm on charts/elasticjob."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.kind import GARBAGE_COLLECTION
from tests.cluster.places import KUBERNETES_VERSION
from tests.cluster.programs import programs
from tests.paths import ROOT

Json = dict[str, Any]

CHART = ROOT / "charts" / "elasticjob"
RELEASE, NAMESPACE = "elasticjob", "elasticjob-system"
HELM_SECONDS = 60.0
WORKLOADS = ("Deployment", "StatefulSet", "Job", "CronJob")

EXTERNAL: Json = {
    "etcd": {"enabled": False},
    "externalEtcd": {"endpoints": ["https://etcd.example:2379"], "secretName": "etcd-root"},
}
MATRIX: dict[str, Json] = {
    "defaults": {},
    "three members": {"etcd": {"members": 3, "antiAffinity": "required"}},
    "no volume": {"etcd": {"persistence": {"enabled": False}}},
    "no TLS": {"etcd": {"tls": {"enabled": False}}},
    "no users": {"etcd": {"auth": {"enabled": False}}},
    "neither": {"etcd": {"tls": {"enabled": False}, "auth": {"enabled": False}}},
    "a Secret of one's own": {"etcd": {"certificates": {"existingSecret": "mine"}}},
    "a Secret of one's own, also for clients": {
        "etcd": {
            "certificates": {"existingSecret": "mine"},
            "tls": {"clientCertificates": "Required"},
        }
    },
    "external": EXTERNAL,
    "labelled namespaces": {"watchNamespaceSelector": {"elasticjob.dev/serve": "true"}},
    "two namespaces": {"watchNamespaces": ["team-a", "team-b"]},
    "guarded namespaces": {"networkPolicy": {"jobNamespaces": ["team-a"]}},
    "watched": {
        "metrics": {
            name: {"enabled": True} for name in ("serviceMonitor", "prometheusRule", "dashboard")
        }
    },
    "dashboard": {"dashboard": {"enabled": True}},
    "dashboard for browsers": {
        "dashboard": {
            "enabled": True,
            "hosts": ["jobs.example.org"],
            "tls": {"secretName": "dashboard-tls"},
        }
    },
    "another name": {"fullnameOverride": "ej", "operator": {"replicas": 2}},
    "little": {
        "crds": {"install": False},
        "rbac": {"aggregate": False},
        "admissionPolicy": {"enabled": False},
        "networkPolicy": {"enabled": False},
        "operator": {"serviceAccount": {"create": False, "name": "given"}},
    },
}

# The C loader if available: the CRD is long.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class HelmRefused(Exception):
    """Failure of helm; the text is its output."""


def helm(*arguments: str, values: Json | None = None, kubeconfig: Path | None = None) -> str:
    """Run helm and return its output. `values` are passed on standard input. Raise HelmRefused."""
    command = [str(programs("helm") / "helm"), *arguments]
    if kubeconfig:
        command += ["--kubeconfig", str(kubeconfig)]
    if values is not None:
        command += ["--values", "-"]
    done = subprocess.run(
        command,
        input=json.dumps(values or {}),
        capture_output=True,
        text=True,
        timeout=HELM_SECONDS,
        env={**os.environ, **GARBAGE_COLLECTION},
    )
    if done.returncode:
        raise HelmRefused(done.stderr)
    return done.stdout


def template(
    values: Json | None = None,
    *options: str,
    name: str = RELEASE,
    kubernetes: str = KUBERNETES_VERSION,
) -> str:
    """Return the manifests of a release with these values, as text. Raise HelmRefused."""
    return _template(json.dumps(values or {}), *options, name=name, kubernetes=kubernetes)


@lru_cache(maxsize=64)
def _template(values: str, *options: str, name: str, kubernetes: str) -> str:
    words = ("--namespace", NAMESPACE, "--kube-version", kubernetes)
    return helm("template", name, str(CHART), *words, *options, values=json.loads(values))


@dataclass(frozen=True, slots=True)
class Rendered:
    """Objects rendered by the chart from some values."""

    objects: list[Json]

    def kinds(self) -> set[str]:
        return {found["kind"] for found in self.objects}

    def find(self, kind: str, name: str) -> Json:
        """Return the one object of this kind and name."""
        found = [o for o in self.objects if (o["kind"], o["metadata"]["name"]) == (kind, name)]
        assert len(found) == 1, f"{len(found)} of {kind} {name}"
        return found[0]

    def has(self, kind: str, name: str) -> bool:
        return any((o["kind"], o["metadata"]["name"]) == (kind, name) for o in self.objects)

    def pods(self) -> Iterator[tuple[str, Json]]:
        """Yield every pod template, with the name of its owner."""
        for found in self.objects:
            if found["kind"] in WORKLOADS:
                yield f"{found['kind']}/{found['metadata']['name']}", pod_template(found)


def pod_template(workload: Json) -> Json:
    """Return the pod template of a Deployment, StatefulSet, Job or CronJob."""
    spec = workload["spec"]
    if workload["kind"] == "CronJob":
        spec = spec["jobTemplate"]["spec"]
    found: Json = spec["template"]
    return found


def render(values: Json | None = None, **options: str) -> Rendered:
    """Return the objects of a release with these values, hooks included. Raise HelmRefused."""
    texts = template(values, **options).split("\n---\n")
    return Rendered([document for text in texts if (document := pickle.loads(_parsed(text)))])


@lru_cache(maxsize=256)
def _parsed(document: str) -> bytes:
    """Return the pickled object of one YAML document, of which each caller gets its own copy."""
    return pickle.dumps(yaml.load(document, _LOADER))


def environment(pod: Json) -> dict[str, Any]:
    """Return the environment of a pod's first container: values, or their sources."""
    return {
        entry["name"]: entry.get("value", entry.get("valueFrom"))
        for entry in pod["spec"]["containers"][0]["env"]
    }
