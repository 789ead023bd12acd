"""Settings of the operator, read from the environment by this module alone.

| variable | meaning | default |
|---|---|---|
| `ELASTICJOB_SIDECAR_IMAGE` | image of the agent in every pod | required |
| `ELASTICJOB_SIDECAR_PULL_POLICY` | its pull policy | IfNotPresent |
| `ELASTICJOB_PULL_SECRETS` | names of pull secrets added to every pod, comma separated | none |
| `ELASTICJOB_SIDECAR_CPU`, `ELASTICJOB_SIDECAR_MEMORY` | an agent's requests | 50m, 64Mi |
| `ELASTICJOB_SIDECAR_CPU_LIMIT`, `…_MEMORY_LIMIT` | its limits, where it has them | 500m, 128Mi |
| `ELASTICJOB_SIDECAR_LIMITS_IN` | where it has limits: GuaranteedPods or AllPods | the first |
| `ELASTICJOB_ETCD_ENDPOINTS` | etcd as URLs, comma separated; pods use the same | required |
| `ELASTICJOB_ETCD_CA_FILE`, `…_CERT_FILE`, `…_KEY_FILE`, `…_SERVER_NAME` | TLS to etcd | none |
| `ELASTICJOB_AGENTS_CERT_FILE`, `…_KEY_FILE` | client certificate of all agents | none |
| `ELASTICJOB_ETCD_USER_FILE`, `ELASTICJOB_ETCD_PASSWORD_FILE` | etcd's user | none |
| `ELASTICJOB_MANAGE_ETCD_USERS` | create an etcd user for each job; needs root | false |
| `ELASTICJOB_ETCD_EXCLUSIVE` | only the operator administers etcd's users | false |
| `ELASTICJOB_ETCD_KNOWN_USERS` | users and roles of etcd's administrator | none |
| `ELASTICJOB_CREDENTIALS_DAYS` | maximum age of a job's etcd user; 0: no limit | 30 |
| `ELASTICJOB_ALLOWED_ENDPOINTS` | permitted values of spec.rendezvous.endpoints | none |
| `ELASTICJOB_NETWORK_POLICIES` | create a NetworkPolicy for each job | false |
| `ELASTICJOB_OPERATOR_LABELS` | its pods' labels there, key=value, comma separated | none |
| `ELASTICJOB_NAMESPACES` | namespaces whose jobs are served | all |
| `ELASTICJOB_NAMESPACE_SELECTOR` | labels of served namespaces, for messages | none |
| `ELASTICJOB_LEASE_NAMESPACE` | namespace of the active replica's Lease | the pod's own |
| `ELASTICJOB_LEASE_NAME` | its name | elasticjob-operator |
| `ELASTICJOB_POD_NAME` | name of this replica | the host's name |
| `ELASTICJOB_METRICS_PORT`, `ELASTICJOB_HEALTH_PORT` | TCP ports | 8080, 8081 |
| `ELASTICJOB_LOG_FORMAT` | text or json | text |
| `ELASTICJOB_LOG_LEVEL` | debug, info, warning or error | info |
| `KUBECONFIG` | kubeconfig, used outside a cluster | ~/.kube/config |
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from elasticjob_operator.domain.manifests.owned_objects import PolicyPeer
from elasticjob_operator.replica.lease import LeaseSettings
from elasticjob_rendezvous.etcd.endpoints import Tls
from elasticjob_rendezvous.protocol.text import echoed

OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
PULL_POLICIES = ("Always", "IfNotPresent", "Never")
GUARANTEED_PODS, ALL_PODS = "GuaranteedPods", "AllPods"
CREDENTIALS_DAYS, MOST_CREDENTIALS_DAYS = 30, 3650
LOG_LEVELS = ("debug", "info", "warning", "error")


class SettingsError(ValueError):
    """Missing or invalid setting; the text names it and the fix."""


@dataclass(frozen=True, slots=True)
class SidecarSettings:
    """Sidecar container of every pod. It has limits, and equal requests, in pods that are otherwise
    of class Guaranteed, or in all of them."""

    image: str
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    cpu: str = "50m"
    memory: str = "64Mi"
    cpu_limit: str = "500m"
    memory_limit: str = "128Mi"
    always_limited: bool = False


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """Operator's own etcd, and the endpoints that jobs may name (`allowed`).

    Args:
        agents: files of the client certificate and key that agents get; None for none.
        exclusive: only the operator administers etcd's users, so it removes unknown ones.
        known_users: users and roles of etcd's administrator.
        credentials_days: maximum age of a job's etcd user; 0 for no limit.
    """

    endpoints: tuple[str, ...]
    tls: Tls | None = None
    user: str | None = None
    password: str | None = None
    manage_users: bool = False
    allowed: frozenset[str] = frozenset()
    agents: tuple[Path, Path] | None = None
    exclusive: bool = False
    known_users: frozenset[str] = frozenset()
    credentials_days: int = CREDENTIALS_DAYS

    @property
    def ca(self) -> bytes | None:
        """Authorities that pods are to trust, as currently in the file."""
        ca_file = self.tls.ca_file if self.tls else None
        return Path(ca_file).read_bytes() if ca_file else None


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings of one replica. Empty `namespaces` means all.

    `policy_peer` is the operator in the jobs' NetworkPolicies; None: jobs get none.
    """

    sidecar: SidecarSettings
    etcd: EtcdSettings
    lease: LeaseSettings
    policy_peer: PolicyPeer | None = None
    namespaces: tuple[str, ...] = ()
    namespace_selector: str = ""
    metrics_port: int = 8080
    health_port: int = 8081
    log_format: Literal["text", "json"] = "text"
    log_level: str = "info"


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings of one replica. Raises `SettingsError`."""
    return _read(os.environ if environ is None else environ)


def _read(environ: Mapping[str, str]) -> Settings:
    log_format = _one_of(environ, "ELASTICJOB_LOG_FORMAT", ("text", "json"))
    namespace = environ.get("ELASTICJOB_LEASE_NAMESPACE") or _own_namespace()
    return Settings(
        sidecar=SidecarSettings(
            image=_required(environ, "ELASTICJOB_SIDECAR_IMAGE"),
            pull_policy=_one_of(
                environ, "ELASTICJOB_SIDECAR_PULL_POLICY", PULL_POLICIES, "IfNotPresent"
            ),
            pull_secrets=_list(environ, "ELASTICJOB_PULL_SECRETS"),
            cpu=environ.get("ELASTICJOB_SIDECAR_CPU") or "50m",
            memory=environ.get("ELASTICJOB_SIDECAR_MEMORY") or "64Mi",
            cpu_limit=environ.get("ELASTICJOB_SIDECAR_CPU_LIMIT") or "500m",
            memory_limit=environ.get("ELASTICJOB_SIDECAR_MEMORY_LIMIT") or "128Mi",
            always_limited=_one_of(
                environ, "ELASTICJOB_SIDECAR_LIMITS_IN", (GUARANTEED_PODS, ALL_PODS)
            )
            == ALL_PODS,
        ),
        etcd=_etcd(environ),
        lease=LeaseSettings(
            namespace=namespace,
            name=environ.get("ELASTICJOB_LEASE_NAME") or "elasticjob-operator",
            identity=environ.get("ELASTICJOB_POD_NAME") or socket.gethostname(),
        ),
        policy_peer=_policy_peer(environ, namespace),
        namespaces=_list(environ, "ELASTICJOB_NAMESPACES"),
        namespace_selector=environ.get("ELASTICJOB_NAMESPACE_SELECTOR", ""),
        metrics_port=_port(environ, "ELASTICJOB_METRICS_PORT", 8080),
        health_port=_port(environ, "ELASTICJOB_HEALTH_PORT", 8081),
        log_format="json" if log_format == "json" else "text",
        log_level=_one_of(environ, "ELASTICJOB_LOG_LEVEL", LOG_LEVELS, "info"),
    )


def _policy_peer(environ: Mapping[str, str], namespace: str) -> PolicyPeer | None:
    """Return the operator's pods, which run in the Lease's namespace."""
    if not _flag(environ, "ELASTICJOB_NETWORK_POLICIES"):
        return None
    labels = []
    for label in _list(environ, "ELASTICJOB_OPERATOR_LABELS"):
        key, _, value = label.partition("=")
        if not key or not value:
            raise SettingsError(
                f"ELASTICJOB_OPERATOR_LABELS must be key=value, got {echoed(label)}"
            )
        labels.append((key, value))
    if not labels:  # an empty selector would mean every pod of the namespace
        raise SettingsError("ELASTICJOB_NETWORK_POLICIES needs ELASTICJOB_OPERATOR_LABELS")
    return PolicyPeer(namespace, tuple(labels))


def _etcd(environ: Mapping[str, str]) -> EtcdSettings:
    endpoints = _endpoints(environ, "ELASTICJOB_ETCD_ENDPOINTS")
    if not endpoints:
        raise SettingsError(
            "ELASTICJOB_ETCD_ENDPOINTS must name at least one etcd, such as http://etcd:2379"
        )
    names = {key: f"ELASTICJOB_ETCD_{key}_FILE" for key in ("CA", "CERT", "KEY")}
    names |= {f"AGENTS_{key}": f"ELASTICJOB_AGENTS_{key}_FILE" for key in ("CERT", "KEY")}
    files = {key: environ.get(name) or None for key, name in names.items()}
    for key, path in files.items():
        if path is not None and not Path(path).is_file():
            raise SettingsError(f"{names[key]} must be a file, got {echoed(path)}")
    for cert, key in (("CERT", "KEY"), ("AGENTS_CERT", "AGENTS_KEY")):
        if (files[cert] is None) != (files[key] is None):
            raise SettingsError(f"{names[cert]} and {names[key]} must be set together")
    agents = (files["AGENTS_CERT"], files["AGENTS_KEY"])
    server_name = environ.get("ELASTICJOB_ETCD_SERVER_NAME") or None
    tls = any(files[key] for key in ("CA", "CERT", "KEY")) or server_name is not None
    user = _content(environ, "ELASTICJOB_ETCD_USER_FILE")
    password = _content(environ, "ELASTICJOB_ETCD_PASSWORD_FILE")
    if (user is None) != (password is None):
        raise SettingsError(
            "ELASTICJOB_ETCD_USER_FILE and ELASTICJOB_ETCD_PASSWORD_FILE must be set together"
        )
    manage = _flag(environ, "ELASTICJOB_MANAGE_ETCD_USERS")
    if manage and user is None:
        raise SettingsError(
            "ELASTICJOB_MANAGE_ETCD_USERS needs etcd's root user in ELASTICJOB_ETCD_USER_FILE"
        )
    return EtcdSettings(
        endpoints=endpoints,
        tls=Tls(files["CA"], files["CERT"], files["KEY"], server_name) if tls else None,
        user=user,
        password=password,
        manage_users=manage,
        allowed=frozenset(_endpoints(environ, "ELASTICJOB_ALLOWED_ENDPOINTS")),
        agents=(Path(agents[0]), Path(agents[1])) if agents[0] and agents[1] else None,
        exclusive=_flag(environ, "ELASTICJOB_ETCD_EXCLUSIVE"),
        known_users=frozenset(_list(environ, "ELASTICJOB_ETCD_KNOWN_USERS")),
        credentials_days=_days(environ, "ELASTICJOB_CREDENTIALS_DAYS"),
    )


def _endpoints(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    found = _list(environ, name)
    for endpoint in found:
        scheme, _, rest = endpoint.rpartition("://")
        host, _, port = rest.rpartition(":")
        sound = host and port.isascii() and port.isdigit() and 0 < int(port) < 65536
        if scheme not in ("", "http", "https") or not sound:
            raise SettingsError(f"{name} must hold http(s)://host:port, got {echoed(endpoint)}")
    return found


def _own_namespace() -> str:
    try:
        return OWN_NAMESPACE.read_text().strip()
    except OSError:
        return "default"  # not in a pod


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise SettingsError(f"{name} must be set")
    return value


def _list(environ: Mapping[str, str], name: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in environ.get(name, "").split(",") if part.strip())


def _content(environ: Mapping[str, str], name: str) -> str | None:
    path = environ.get(name, "")
    if not path:
        return None
    try:
        found = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{name}: {echoed(path)} cannot be read: {error}") from error
    if not found:
        raise SettingsError(f"{name}: {echoed(path)} must not be empty")
    return found


def _one_of(
    environ: Mapping[str, str], name: str, words: tuple[str, ...], default: str = ""
) -> str:
    value = environ.get(name) or default or words[0]
    if value not in words:
        raise SettingsError(f"{name} must be one of {', '.join(words)}, got {echoed(value)}")
    return value


def _flag(environ: Mapping[str, str], name: str) -> bool:
    return _one_of(environ, name, ("false", "true")) == "true"


def _days(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name) or str(CREDENTIALS_DAYS)
    if not (text.isascii() and text.isdigit()) or int(text) > MOST_CREDENTIALS_DAYS:
        most = MOST_CREDENTIALS_DAYS
        raise SettingsError(f"{name} must be days from 0 to {most}, got {echoed(text)}")
    return int(text)


def _port(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or not 0 < int(text) <= 65535:
        raise SettingsError(f"{name} must be a port from 1 to 65535, got {echoed(text)}")
    return int(text)
