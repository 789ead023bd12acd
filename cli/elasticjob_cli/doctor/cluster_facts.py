"""Facts about a cluster for `elasticjob doctor`, read with kubectl; it decides nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from elasticjob_cli.doctor.cluster_checks import VERBS, ClusterFacts, Items, Json, schema_paths
from elasticjob_cli.doctor.findings import Unread
from elasticjob_cli.errors import CommandError
from elasticjob_cli.kubectl import RESOURCE, Kubectl, Refused
from elasticjob_operator.domain.manifests.names import UID_LABEL
from elasticjob_operator.model.crdgen import structural_schema
from elasticjob_operator.model.job import GROUP, PLURAL, VERSION

PART = "app.kubernetes.io/part-of=elasticjob"
COMPONENT = "app.kubernetes.io/component"
SYSTEM = "elasticjob-system"
"""Usual namespace of the operator, read if the whole cluster may not be read."""
DEFAULT_NAMESPACE = "default"
PARALLEL = 8
ABSENT = ("NotFound",)
T = TypeVar("T")


def gather_cluster(there: Kubectl) -> ClusterFacts:
    """Read all facts; an error becomes part of them."""
    server = _read(lambda: _server(there))
    namespace = there.namespace or _read(lambda: _configured_namespace(there))
    if isinstance(namespace, Unread):
        namespace = DEFAULT_NAMESPACE
    there = Kubectl(namespace, there.context, there.kubeconfig)
    with ThreadPoolExecutor(PARALLEL) as pool:
        return _Gathering(there, pool).facts(server)


def _read(call: Callable[[], T]) -> T | Unread:
    """Return a fact, or the reason for which it cannot be read."""
    try:
        return call()
    except Refused as error:
        reason = error.reason
        return Unread(str(error), reason in ("Forbidden", "Unauthorized"), reason in ABSENT)
    except (CommandError, ImportError, ValueError, KeyError) as error:
        return Unread(str(error))


def _server(there: Kubectl) -> Json:
    document = json.loads(there.call("version", "--output=json"))
    found: Json = document["serverVersion"]
    return found


def _configured_namespace(there: Kubectl) -> str:
    """Return the namespace of the kubeconfig's context."""
    words = ("view", "--minify", "--output=jsonpath={..namespace}")
    return there.call("config", *words).strip() or DEFAULT_NAMESPACE


class _Gathering:
    """Reads of one cluster, side by side where they do not depend on each other."""

    def __init__(self, there: Kubectl, pool: ThreadPoolExecutor) -> None:
        self._there = there
        self._namespace = there.namespace or DEFAULT_NAMESPACE
        self._pool = pool

    def facts(self, server: Json | Unread) -> ClusterFacts:
        if isinstance(server, Unread):  # each further call would wait for the same server
            return self._facts(server, SYSTEM, Unread("the API server does not answer"))
        found = self._deployments()
        place = found[0]["metadata"]["namespace"] if isinstance(found, list) and found else SYSTEM
        return self._facts(server, place, found)

    def _deployments(self) -> Items:
        words = ("deployments.apps", "--selector", f"{PART},{COMPONENT}=operator")
        everywhere = self._items(*words, "--all-namespaces")
        if isinstance(everywhere, Unread) and everywhere.forbidden:
            return self._items(*words, place=SYSTEM)
        return everywhere

    def _facts(self, server: Json | Unread, place: str, deployments: Items) -> ClusterFacts:
        reads: dict[str, Callable[[], Any]] = {
            "definition": lambda: self._object(f"crd/{PLURAL}.{GROUP}"),
            "lease": lambda: self._lease(deployments),
            "etcd_sets": lambda: self._part("statefulsets.apps", place, "etcd"),
            "services": lambda: self._items("services", "--selector", PART, place=place),
            "slices": lambda: self._items("endpointslices.discovery.k8s.io", place=place),
            "dns": lambda: self._items(
                "endpointslices.discovery.k8s.io",
                "--selector=kubernetes.io/service-name=kube-dns",
                place="kube-system",
            ),
            "storage_classes": lambda: self._items("storageclasses.storage.k8s.io"),
            "claims": lambda: self._claims(place),
            "jobs": lambda: self._items(RESOURCE),
            "policies": self._policies,
            "pods": lambda: self._items("pods", "--selector", PART, place=place),
            "job_pods": lambda: self._items("pods", "--selector", UID_LABEL),
            "access": self._access,
            "network_policies": lambda: self._items(
                "networkpolicies.networking.k8s.io", "--selector", PART, place=place
            ),
            "daemon_sets": lambda: self._items("daemonsets.apps", "--all-namespaces"),
        }
        if isinstance(server, Unread):
            nothing = Unread(server.message)
            found: dict[str, Any] = dict.fromkeys(reads, nothing)
        else:
            running = {name: self._pool.submit(_read, read) for name, read in reads.items()}
            found = {name: one.result() for name, one in running.items()}
        sets = found["etcd_sets"]
        has_etcd = isinstance(sets, list) and bool(sets)
        secret = self._secret_name(deployments)
        certificates, authority = self._secrets(place, secret, has_etcd)
        return ClusterFacts(
            now=datetime.now(UTC),
            namespace=self._namespace,
            cli_version=_installed(),
            schema_version=VERSION,
            schema_paths=frozenset(schema_paths(structural_schema())),
            server=server,
            deployments=deployments,
            etcd_health=self._health(place, found["pods"]),
            certificates=certificates,
            authority=authority,
            extra={"endpoints": _environment(deployments).get("ELASTICJOB_ETCD_ENDPOINTS", "")},
            **found,
        )

    def _object(self, *words: str, place: str | None = None) -> Json:
        there = self._there if place is None else self._in(place)
        return there.get(*words)

    def _in(self, place: str) -> Kubectl:
        return Kubectl(place, self._there.context, self._there.kubeconfig)

    def _items(self, *words: str, place: str | None = None) -> Items:
        there = self._there if place is None else self._in(place)
        return _read(lambda: there.items(*words))

    def _part(self, kind: str, place: str, component: str) -> Items:
        return self._items(kind, "--selector", f"{PART},{COMPONENT}={component}", place=place)

    def _lease(self, deployments: Items) -> Json | Unread:
        if isinstance(deployments, Unread):
            return deployments
        if not deployments:
            return Unread("there is no operator")
        name = _environment(deployments).get("ELASTICJOB_LEASE_NAME", "")
        place = deployments[0]["metadata"]["namespace"]
        return self._object(f"leases.coordination.k8s.io/{name}", place=place)

    def _claims(self, place: str) -> Items:
        """Return the claims of both namespaces, each once."""
        found: dict[str, Json] = {}
        for items in (self._items("pvc", place=place), self._items("pvc")):
            if isinstance(items, Unread):
                return items
            found |= {item["metadata"]["uid"]: item for item in items}
        return list(found.values())

    def _policies(self) -> Items:
        kinds = "validatingadmissionpolicies,validatingadmissionpolicybindings"
        return self._items(kinds, "--selector", PART)

    def _access(self) -> Mapping[str, bool]:
        """Return the user's permission for each verb on ElasticJobs."""
        found = {}
        for verb in VERBS:
            attributes = {
                "namespace": self._namespace,
                "verb": verb,
                "group": GROUP,
                "resource": PLURAL,
            }
            review = {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SelfSubjectAccessReview",
                "spec": {"resourceAttributes": attributes},
            }
            # kubectl's own validation reads a schema, which not every user may read.
            words = ("create", "--filename=-", "--output=json", "--validate=false")
            answer = self._there.call(*words, given=json.dumps(review))
            found[verb] = bool(json.loads(answer)["status"]["allowed"])
        return found

    def _health(self, place: str, pods: Items) -> Mapping[str, str | Unread]:
        """Return the answer of each etcd pod, through the API server's proxy."""
        if isinstance(pods, Unread):
            return {}
        names = [
            pod["metadata"]["name"]
            for pod in pods
            if pod["metadata"].get("labels", {}).get(COMPONENT) == "etcd"
        ]
        path = f"/api/v1/namespaces/{place}/pods/{{}}:2381/proxy/health"
        reads = {
            name: self._pool.submit(_read, lambda name=name: self._raw(path.format(name)))
            for name in names
        }
        return {name: one.result() for name, one in reads.items()}

    def _raw(self, path: str) -> str:
        return Kubectl(None, self._there.context, self._there.kubeconfig).call(
            "get", f"--raw={path}"
        )

    def _secret_name(self, deployments: Items) -> str:
        """Return the Secret with etcd's certificates that the operator mounts; empty if none."""
        if isinstance(deployments, Unread) or not deployments:
            return ""
        volumes = deployments[0]["spec"]["template"]["spec"].get("volumes") or ()
        names = [volume["secret"]["secretName"] for volume in volumes if volume.get("secret")]
        return names[0] if names else ""

    def _secrets(
        self, place: str, secret: str, has_etcd: bool
    ) -> tuple[Mapping[str, datetime] | Unread, Json | Unread]:
        """Return the ends of the certificates, and the authority's Secret without its data."""
        if not secret:
            return {}, {}
        ends = _read(lambda: _ends(self._object(f"secret/{secret}", place=place)))
        if not has_etcd:
            return ends, {}
        metadata = _read(
            lambda: {
                "metadata": self._object(f"secret/{secret}-authority", place=place)["metadata"]
            }
        )
        return ends, metadata


def _ends(secret: Json) -> dict[str, datetime]:
    """Return the end of each certificate in a Secret; keys without one are left out."""
    from cryptography import x509

    ends: dict[str, datetime] = {}
    for key, value in secret.get("data", {}).items():
        if not key.endswith(".crt"):
            continue
        for certificate in x509.load_pem_x509_certificates(base64.b64decode(value)):
            ends[key] = min(
                ends.get(key, certificate.not_valid_after_utc), certificate.not_valid_after_utc
            )
    return ends


def _environment(deployments: Items) -> dict[str, str]:
    """Return the plain environment of the operator's container."""
    if isinstance(deployments, Unread) or not deployments:
        return {}
    containers = deployments[0]["spec"]["template"]["spec"]["containers"]
    return {
        variable["name"]: variable.get("value", "") for variable in containers[0].get("env") or ()
    }


def _installed() -> str:
    try:
        return version("elasticjob")
    except PackageNotFoundError:
        return "unknown"
