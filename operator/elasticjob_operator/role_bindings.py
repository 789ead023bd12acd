"""Command `python -m elasticjob_operator bind`: the operator's access to the namespaces it serves.

RBAC has no label selector and cannot exclude a namespace. This command, under an identity of its
own, keeps one RoleBinding of the operator's ClusterRole in each served namespace: all of them, or
those with the selector's labels, always without the excluded ones. It may bind this one ClusterRole
and nothing else, and runs no code of users.

A binding belongs to the ClusterRole: garbage collection deletes it with the release.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import kopf

from elasticjob_operator import logs
from elasticjob_operator.kubernetes.client import (
    NAMESPACES,
    AlreadyExists,
    Forbidden,
    Invalid,
    Json,
    Kind,
    Kube,
    KubeError,
    NotFound,
)
from elasticjob_operator.reconcile.watches import StopSignals, register_login, watch
from elasticjob_operator.replica.health import Health, serve_health
from elasticjob_operator.replica.signals import run_until_signal

ROLE_BINDINGS = Kind("rbac.authorization.k8s.io", "v1", "rolebindings")
CLUSTER_ROLES = Kind("rbac.authorization.k8s.io", "v1", "clusterroles", namespaced=False)
RBAC_GROUP = "rbac.authorization.k8s.io"
MANAGED_BY = {"app.kubernetes.io/managed-by": "elasticjob"}

RESYNC_SECONDS = 60.0
COALESCE_SECONDS = 0.05
RETRY_SECONDS = 2.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Request:
    """Arguments of the command.

    Args:
        role: ClusterRole to bind, and the name of each binding.
        account: namespace and name of the operator's service account.
        selector: label selector of the served namespaces; empty: all.
        excluded: namespaces that never get a binding.
    """

    role: str
    account: tuple[str, str]
    selector: str = ""
    excluded: frozenset[str] = frozenset()
    health_port: int = 8081
    log_format: str = "text"
    log_level: str = "info"


@dataclass(frozen=True, slots=True)
class Changes:
    """Difference between the bindings that exist and those that are due.

    Args:
        create: namespaces without a binding.
        delete: bindings that are of no use, or differ from the wanted one.
        foreign: namespaces where another object has the name.
    """

    create: tuple[str, ...] = ()
    delete: tuple[Json, ...] = ()
    foreign: tuple[str, ...] = ()


def binding(request: Request, role_uid: str) -> Json:
    """Return the RoleBinding of every served namespace."""
    namespace, name = request.account
    owner = {
        "apiVersion": f"{RBAC_GROUP}/v1",
        "kind": "ClusterRole",
        "name": request.role,
        "uid": role_uid,
    }
    return {
        "apiVersion": f"{RBAC_GROUP}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": request.role, "labels": MANAGED_BY, "ownerReferences": [owner]},
        "roleRef": {"apiGroup": RBAC_GROUP, "kind": "ClusterRole", "name": request.role},
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    }


def due_changes(
    wanted: Json, namespaces: Iterable[Json], bindings: Iterable[Json], excluded: frozenset[str]
) -> Changes:
    """Compare the existing bindings with the wanted one in each served namespace.

    A binding that differs is deleted and created again: its roleRef cannot be changed.
    """
    served = {
        one["metadata"]["name"]
        for one in namespaces
        if one["metadata"]["name"] not in excluded and not one["metadata"].get("deletionTimestamp")
    }
    delete, present, foreign = [], set(), set()
    for found in bindings:
        namespace = found["metadata"]["namespace"]
        if not MANAGED_BY.items() <= (found["metadata"].get("labels") or {}).items():
            foreign.add(namespace)
        elif namespace in served and _equal(found, wanted):
            present.add(namespace)
        else:
            delete.append(found)
    create = served - present - foreign
    return Changes(tuple(sorted(create)), tuple(delete), tuple(sorted(foreign & served)))


def _equal(found: Json, wanted: Json) -> bool:
    owners = [reference["uid"] for reference in found["metadata"].get("ownerReferences") or ()]
    expected = [reference["uid"] for reference in wanted["metadata"]["ownerReferences"]]
    parts = ("roleRef", "subjects")
    return owners == expected and all(found.get(part) == wanted[part] for part in parts)


async def reconcile(kube: Kube, request: Request) -> tuple[Changes, dict[str, KubeError]]:
    """Create and delete bindings; return the changes, and the errors by namespace.

    A quota or policy of one namespace must not keep the others from being served. Raises
    `KubeError` if the bindings cannot be compared, or the API server does not answer.
    """
    role = await kube.get(CLUSTER_ROLES, None, request.role)
    namespaces = await kube.list(NAMESPACES, None, request.selector, metadata_only=True)
    bindings = await kube.list(ROLE_BINDINGS, None, field=f"metadata.name={request.role}")
    wanted = binding(request, role["metadata"]["uid"])
    changes = due_changes(wanted, namespaces, bindings, request.excluded)
    refused: dict[str, KubeError] = {}
    for found in changes.delete:
        metadata = found["metadata"]
        with _collected(refused, metadata["namespace"]):
            await kube.delete(
                ROLE_BINDINGS, metadata["namespace"], metadata["name"], uid=metadata["uid"]
            )
            log.info("removed the operator's access to namespace %s", metadata["namespace"])
    for namespace in changes.create:
        # Another replica may have created it, and the namespace may be gone.
        with _collected(refused, namespace), suppress(AlreadyExists, NotFound):
            await kube.create(ROLE_BINDINGS, namespace, wanted)
            log.info("gave the operator access to namespace %s", namespace)
    return changes, refused


@contextmanager
def _collected(refused: dict[str, KubeError], namespace: str) -> Iterator[None]:
    """Store the API server's refusal of a write in a namespace. Raises `KubeError` without one."""
    try:
        yield
    except KubeError as error:
        if not error.status:  # no answer: the other writes would have none, either
            raise
        refused[namespace] = error


def _pause_seconds(refused: Iterable[KubeError], last: float) -> float:
    """Return the time to the next comparison. A quota, a policy or a validation refuses again; a
    conflict, or a server without capacity or with a failed webhook, may not: it is tried again
    soon, then after twice the `last` pause."""
    lasting = all(isinstance(error, Forbidden | Invalid) for error in refused)
    if lasting:
        return RESYNC_SECONDS
    return RETRY_SECONDS if last >= RESYNC_SECONDS else min(2 * last, RESYNC_SECONDS / 2)


class Binder:
    """Keeper of the bindings: watches namespaces, and compares all of them every minute."""

    def __init__(self, kube: Kube, request: Request, health: Health) -> None:
        self._kube = kube
        self._request = request
        self._health = health
        self._changed = asyncio.Event()
        self._foreign: tuple[str, ...] = ()
        self._refused: dict[str, str] = {}

    async def run(self) -> None:
        """Serve until cancelled, or until the watch fails."""
        async with asyncio.TaskGroup() as tasks:
            keeper = tasks.create_task(self._keep())
            signals = StopSignals()
            await watch(self._registry(), self._request.role, signals, clusterwide=True)
            keeper.cancel()

    async def _keep(self) -> None:
        seconds = RESYNC_SECONDS
        while True:
            self._changed.clear()
            try:
                changes, refused = await reconcile(self._kube, self._request)
                self._note_foreign(changes.foreign)
                self._note_refused(refused)
                seconds = _pause_seconds(refused.values(), seconds)
                self._health.ready = True
            except KubeError as error:
                log.warning("cannot update the operator's access to namespaces: %s", error)
                seconds = RETRY_SECONDS
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), seconds)
            await asyncio.sleep(COALESCE_SECONDS)

    def _note_foreign(self, foreign: tuple[str, ...]) -> None:
        for namespace in foreign:
            if namespace not in self._foreign:
                log.warning(
                    "the operator has no access to namespace %s: rolebinding %s there was not "
                    "created by this command; delete it",
                    namespace,
                    self._request.role,
                )
        self._foreign = foreign

    def _note_refused(self, refused: Mapping[str, KubeError]) -> None:
        texts = {namespace: str(error) for namespace, error in refused.items()}
        for namespace, text in texts.items():
            if self._refused.get(namespace) != text:
                log.warning("cannot update the operator's access to %s: %s", namespace, text)
        self._refused = texts

    async def _wake(self, **_: Any) -> None:
        self._changed.set()

    def _registry(self) -> kopf.OperatorRegistry:
        found = kopf.OperatorRegistry()
        register_login(found)
        kopf.on.event(NAMESPACES.group, NAMESPACES.version, NAMESPACES.plural, registry=found)(
            self._wake
        )
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code: 0 after a signal, 1 on failure, 2 on wrong usage."""
    request = _parsed(arguments)
    logs.configure("json" if request.log_format == "json" else "text", request.log_level)
    return run_until_signal(lambda: _serve(request))


async def _serve(request: Request) -> None:
    health = Health()
    async with serve_health(health, request.health_port), Kube.connect() as kube:
        await Binder(kube, request, health).run()


def _parsed(arguments: Sequence[str] | None) -> Request:
    parser = argparse.ArgumentParser(
        prog="python -m elasticjob_operator bind",
        description="Keep a RoleBinding for the operator in each namespace that it serves.",
    )
    parser.add_argument("--cluster-role", required=True, help="ClusterRole to bind")
    parser.add_argument(
        "--service-account",
        required=True,
        metavar="NAMESPACE/NAME",
        type=_account,
        help="service account of the operator",
    )
    parser.add_argument(
        "--selector", default="", help="labels of the served namespaces, key=value,…; default: all"
    )
    parser.add_argument(
        "--except",
        dest="excluded",
        action="append",
        default=[],
        metavar="NAMESPACE",
        help="namespace that never gets a binding; may be repeated",
    )
    parser.add_argument("--health-port", type=int, default=8081, help="port of the health probes")
    parser.add_argument("--log-format", default="text", choices=["text", "json"])
    parser.add_argument(
        "--log-level", default="info", choices=["debug", "info", "warning", "error"]
    )
    given = parser.parse_args(arguments)
    return Request(
        role=given.cluster_role,
        account=given.service_account,
        selector=given.selector,
        excluded=frozenset(given.excluded),
        health_port=given.health_port,
        log_format=given.log_format,
        log_level=given.log_level,
    )


def _account(text: str) -> tuple[str, str]:
    namespace, slash, name = text.partition("/")
    if not slash or not namespace or not name or "/" in name:
        raise argparse.ArgumentTypeError(f"must be NAMESPACE/NAME, got {text!r}")
    return namespace, name
