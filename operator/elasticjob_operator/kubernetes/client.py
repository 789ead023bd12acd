"""Kubernetes API client on raw JSON: the only code besides kopf's watches that calls the server.

Objects are not parsed into models, which would take most of an operator's CPU time. `requests`
enforces the timeout of every call.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from kubernetes.aio.client import Configuration

from elasticjob_operator.kubernetes.errors import (
    AlreadyExists,
    Cause,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    KubeError,
    NoSuchKind,
    NotFound,
    QuotaConflict,
    QuotaExceeded,
    TooLarge,
    TooManyRequests,
    Unauthorized,
    Unreachable,
)
from elasticjob_operator.kubernetes.kinds import (
    BUDGETS,
    ELASTICJOBS,
    EVENTS,
    LEASES,
    NAMESPACES,
    NETWORK_POLICIES,
    NODES,
    PODS,
    SECRETS,
    SERVICES,
    Json,
    Kind,
)
from elasticjob_operator.kubernetes.requests import Calls, Request, load_configuration
from elasticjob_operator.model.job import FIELD_MANAGER

__all__ = [
    "BUDGETS",
    "ELASTICJOBS",
    "EVENTS",
    "LEASES",
    "NAMESPACES",
    "NETWORK_POLICIES",
    "NODES",
    "PODS",
    "SECRETS",
    "SERVICES",
    "AlreadyExists",
    "Cause",
    "Conflict",
    "Forbidden",
    "Gone",
    "Invalid",
    "Json",
    "Kind",
    "Kube",
    "KubeError",
    "NoSuchKind",
    "NotFound",
    "QuotaConflict",
    "QuotaExceeded",
    "TooLarge",
    "TooManyObjects",
    "TooManyRequests",
    "Unauthorized",
    "Unreachable",
]

Objects = list[Json]  # as `Kube.list` hides the builtin where its own methods are annotated

CALL_SECONDS = 10.0
"""Timeout of one request including retries; of each page for a list."""
POD_SECONDS = 35.0
"""Timeout of the creation and the deletion of a pod. An admission webhook has up to 30 s, 10 s if
unset: only then the API server goes on without it, or refuses with an error that names it."""
PAGE_SIZE = 500
SMALLER_PAGES = 8
"""Factor by which the next page is smaller after one that was too large."""
MAX_OBJECTS = 200_000
"""Maximum number of objects in a list."""
RESTARTS = 3
"""Maximum number of restarts of a list whose pages have expired."""
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"


class TooManyObjects(Exception):
    """List with more objects than memory may hold."""


class Kube:
    """Client of one API server. `connect` closes it at exit; otherwise call `close`.

    `call_seconds` replaces `CALL_SECONDS` and `POD_SECONDS`.
    """

    def __init__(
        self,
        configuration: Configuration,
        call_seconds: float | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._pod_seconds = POD_SECONDS if call_seconds is None else call_seconds
        seconds = CALL_SECONDS if call_seconds is None else call_seconds
        self._calls = Calls(configuration, seconds, wall_clock)

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        kubeconfig: Path | None = None,
        context: str | None = None,
        call_seconds: float | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> AsyncIterator[Kube]:
        """Connect with the pod's service account, or with a kubeconfig if named or outside a pod.

        Raises:
            KubeError: there is no usable configuration.
        """
        kube = cls(await load_configuration(kubeconfig, context), call_seconds, wall_clock)
        try:
            yield kube
        finally:
            await kube.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._calls.close()

    def now(self) -> datetime:
        """Return the UTC time of the API server's clock, estimated from its responses."""
        return self._calls.now()

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        """Read one object. Raises NotFound."""
        return await self._calls.call(Request("get", kind, namespace, name))

    async def list(
        self,
        kind: Kind,
        namespace: str | None = None,
        selector: str = "",
        metadata_only: bool = False,
        field: str = "",
        page_size: int = PAGE_SIZE,
        keep: Callable[[Json], Json] | None = None,
        most: int = MAX_OBJECTS,
    ) -> Objects:
        """Return all objects of a kind that match the label selector, in one or all namespaces.

        Items of a list lack kind and apiVersion.

        Args:
            metadata_only: fetch only their metadata.
            field: field selector.
            page_size: number of objects per request, fewer if they are large.
            keep: returns the part of an object to keep. The whole of one page at most is then in
                memory.
            most: maximum number of objects.

        Raises:
            TooManyObjects: more objects match.
        """
        query = {"limit": str(page_size)}
        if selector:
            query["labelSelector"] = selector
        if field:
            query["fieldSelector"] = field
        accept = _METADATA_ONLY if metadata_only else "application/json"
        request = Request("list", kind, namespace, query=query, accept=accept)
        for _ in range(RESTARTS):
            with suppress(Gone):  # the pages' snapshot expired before the last one was read
                return await self._pages(request, keep, most)
        return await self._pages(request, keep, most)

    async def create(
        self,
        kind: Kind,
        namespace: str | None,
        body: Json,
        *,
        dry_run: bool = False,
        strict: bool = False,
    ) -> Json:
        """Create an object; return it with the fields the server filled in.

        Args:
            dry_run: run admission and validation without storing the object.
            strict: refuse unknown and duplicate fields instead of dropping them.

        Raises:
            AlreadyExists, Invalid, Forbidden, QuotaExceeded, NotFound (the namespace).
        """
        query = {"fieldManager": FIELD_MANAGER}
        if dry_run:
            query["dryRun"] = "All"
        if strict:
            query["fieldValidation"] = "Strict"
        name = body.get("metadata", {}).get("name", "")
        request = Request("create", kind, namespace, about=name, query=query, body=body)
        return await self._change(request)

    async def patch(
        self, kind: Kind, namespace: str | None, name: str, body: Json, *, subresource: str = ""
    ) -> Json:
        """Merge `body` into the object (None deletes a field); return the object.

        `metadata.uid` and `metadata.resourceVersion` in the body are preconditions. Servers ignore
        the uid for subresources: there it must come with the version.

        Raises:
            NotFound, Conflict (a precondition), Invalid, Forbidden.
        """
        preconditions = body.get("metadata", {})
        if subresource and "uid" in preconditions and not preconditions.get("resourceVersion"):
            raise ValueError(f"patch of {subresource}: resourceVersion must come with uid")
        query = {"fieldManager": FIELD_MANAGER}
        try:
            return await self._calls.call(
                Request("patch", kind, namespace, name, subresource, query=query, body=body)
            )
        except Invalid as error:
            if all(cause.field != "metadata.uid" for cause in error.causes):
                raise
            # Here the server reports a uid mismatch as an attempt to change the uid.
            raise Conflict(
                error.operation, error.message, error.status, error.reason, error.causes
            ) from error

    async def delete(
        self,
        kind: Kind,
        namespace: str | None,
        name: str,
        *,
        uid: str,
        resource_version: str | None = None,
    ) -> bool:
        """Delete the object with this uid, with background propagation and its own grace period.

        Returns:
            False if it was already gone, or if another object has its name.

        Raises:
            Conflict: it is no longer at `resource_version`.
        """
        preconditions = {"uid": uid}
        if resource_version is not None:
            preconditions["resourceVersion"] = resource_version
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": preconditions,
        }
        try:
            await self._change(Request("delete", kind, namespace, name, body=options))
        except NotFound:
            return False
        except Conflict:
            # The response does not name the precondition, of the two, that failed.
            if resource_version is None or not await self._is(kind, namespace, name, uid):
                return False
            raise
        return True

    async def _change(self, request: Request) -> Json:
        """Return the response to a creation or a deletion; of a pod within `POD_SECONDS`."""
        seconds = self._pod_seconds if request.kind == PODS else None
        return await self._calls.call(replace(request, seconds=seconds))

    async def _is(self, kind: Kind, namespace: str | None, name: str, uid: str) -> bool:
        try:
            found = await self.get(kind, namespace, name)
        except NotFound:
            return False
        return bool(found["metadata"]["uid"] == uid)

    async def _pages(
        self, request: Request, keep: Callable[[Json], Json] | None, most: int
    ) -> Objects:
        items: Objects = []
        while True:
            try:
                page = await self._calls.call(request)
            except TooLarge:
                size = int(request.query["limit"])
                if size == 1:
                    raise
                smaller = str(max(size // SMALLER_PAGES, 1))
                request = replace(request, query={**request.query, "limit": smaller})
                continue
            found = page["items"] or ()
            items += found if keep is None else map(keep, found)
            if len(items) > most:
                raise TooManyObjects(f"{request}: more than {most} objects match")
            token = page["metadata"].get("continue")
            if not token:
                return items
            request = replace(request, query={**request.query, "continue": token})
