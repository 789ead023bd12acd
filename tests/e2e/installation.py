"""ElasticJob in the cluster: installation with Helm, and access to its parts."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.console import Console, Json, until
from tests.paths import ROOT

CHART = ROOT / "charts" / "elasticjob"
VALUES = Path(__file__).parent / "values.yaml"

RELEASE = "elasticjob"
SYSTEM = "elasticjob-system"
OPERATOR = "deployment/elasticjob-operator"
ETCD_POD = "elasticjob-etcd-0"
LEASE = "elasticjob-operator"
DENYING = "e2e-deny"
"""Namespace with a default-deny policy, named in values.yaml; it exists before the chart."""

_OPERATOR_LABELS = "app.kubernetes.io/component=operator"


@dataclass(frozen=True, slots=True)
class Installation:
    """Release of the chart."""

    console: Console

    def install(self) -> None:
        """Install as the README describes, with this checkout's chart and images."""
        if self.console.api.find("namespaces", DENYING) is None:
            self.console.kubectl("create", "namespace", DENYING)
        # The label makes the next run remove this namespace at its beginning.
        self.console.kubectl("label", "--overwrite", "namespace", DENYING, "elasticjob-e2e=")
        self.console.helm(
            "install", RELEASE, CHART, "--namespace", SYSTEM, "--create-namespace",
            "--values", VALUES, "--wait", "--timeout", "180s",
        )  # fmt: skip

    def upgrade(self, **values: object) -> None:
        changes = [f"--set={name.replace('__', '.')}={value}" for name, value in values.items()]
        self.console.helm(
            "upgrade", RELEASE, CHART, "--namespace", SYSTEM, "--values", VALUES, *changes,
            "--wait", "--timeout", "180s",
        )  # fmt: skip

    def uninstall(self) -> None:
        self.console.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout", "90s")

    def remove(self) -> None:
        """Remove the release, the tests' namespaces, and the data that an uninstall keeps: etcd's
        data would bind the next etcd to its node.
        """
        if self.installed:
            self.uninstall()
        namespaces = "namespace", "--ignore-not-found"
        self.console.kubectl("delete", *namespaces, "-l", "elasticjob-e2e", seconds=180)
        self.console.kubectl("delete", *namespaces, SYSTEM, seconds=180)

    @property
    def installed(self) -> bool:
        releases = self.console.helm("list", "--all-namespaces", "--all", "-o", "json")
        return any(found["name"] == RELEASE for found in json.loads(releases))

    # -- parts ---

    def operators(self) -> list[Json]:
        """Return the operator's pods that are not being deleted."""
        found = self.console.api.items("pods", SYSTEM, labels=_OPERATOR_LABELS)
        return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]

    def leader(self) -> str:
        """Return the holder of the leader lease, empty if there is none."""
        lease = self.console.api.find("leases", LEASE, SYSTEM) or {}
        return str((lease.get("spec") or {}).get("holderIdentity") or "")

    def ready(self, operators: int = 1, seconds: float = 90) -> None:
        """Wait until operator and etcd are Ready."""
        until(
            lambda: len(self.operators()) == operators and all(map(is_ready, self.operators())),
            f"{operators} operators to be ready",
            seconds,
        )
        until(
            lambda: is_ready(self.console.api.find("pods", ETCD_POD, SYSTEM) or {}),
            "etcd to be ready",
            seconds,
        )

    def etcdctl(self, *words: str) -> str:
        command = etcdctl(self.console, *words)
        return self.console.kubectl("-n", SYSTEM, "exec", ETCD_POD, "-c", "etcd", "--", *command)

    def anonymous_read(self) -> str:
        """Return etcd's answer to a read by a client with a certificate and without a user."""
        command = [w for w in etcdctl(self.console, "get", "a") if not w.startswith("--user=")]
        place = ("-n", SYSTEM, "exec", ETCD_POD, "-c", "etcd")
        return self.console.kubectl(*place, "--", *command, check=False)

    def keys_of(self, uid: str) -> list[str]:
        """Return the keys of a job in etcd."""
        printed = self.etcdctl("get", "--prefix", "/elasticjob/", "--keys-only")
        return [key for key in printed.split() if f"/{uid}/" in key]


def is_ready(found: Json) -> bool:
    """Return True if a pod or a node is Ready."""
    conditions = (found.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def etcdctl(console: Console, *words: str) -> list[str]:
    """Return an etcdctl command for etcd's container, as root with the Secret's password."""
    secret = console.api.find("secrets", "elasticjob-etcd", SYSTEM) or {"data": {"password": ""}}
    password = base64.b64decode(secret["data"]["password"]).decode()
    endpoint = f"--endpoints=https://elasticjob-etcd.{SYSTEM}.svc:2379"
    folder = "/etc/etcd/tls"
    files = [f"--cacert={folder}/ca.crt", f"--cert={folder}/tls.crt", f"--key={folder}/tls.key"]
    login = [f"--user=root:{password}", *files, endpoint]
    return ["etcdctl", *login, *words]
