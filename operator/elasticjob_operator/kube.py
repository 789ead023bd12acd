"""The API server, as raw JSON: the only code that talks to it besides kopf's watches.

Nothing is parsed into models: reading pods into them costs most of an operator's time. Every call
ends within its time; what is safe to send again is sent again within that time, nothing else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from elasticjob_operator.core.server_time import TELLING_SECONDS, ahead_seconds
from elasticjob_operator.kube_errors import (
    AlreadyExists,
    Cause,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    KubeError,
    NoSuchKind,
    NotFound,
    QuotaExceeded,
    TooManyRequests,
    Unauthorized,
    Unreachable,
    error_of,
)
from elasticjob_operator.kube_request import (
    BUDGETS,
    ELASTICJOBS,
    EVENTS,
    LEASES,
    NAMESPACES,
    NODES,
    PODS,
    SECRETS,
    SERVICES,
    Json,
    Kind,
    Request,
)

__all__ = [
    "BUDGETS",
    "ELASTICJOBS",
    "EVENTS",
    "LEASES",
    "NAMESPACES",
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
    "QuotaExceeded",
    "TooManyRequests",
    "Unauthorized",
    "Unreachable",
]

log = logging.getLogger(__name__)

Objects = list[Json]  # as `Kube.list` hides the builtin where its own methods are annotated

CALL_SECONDS = 10.0
"""Time for one request, its repetitions included; for a list, of each page."""
PAGE_SIZE = 500
RESTARTS = 3
"""How often a list starts over because its pages have expired."""
UNANSWERED_PAUSE_SECONDS = 0.2
FIELD_MANAGER = "elasticjob-operator"

_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
_UNTIMED = aiohttp.ClientTimeout(total=None)  # the whole call has its time, see `_call`


class Kube:
    """A client of one API server, as `connect` makes it; `close` it otherwise."""

    def __init__(
        self,
        configuration: Configuration,
        call_seconds: float = CALL_SECONDS,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._configuration: Any = configuration
        self._host = configuration.host.rstrip("/")
        self._rest: Any = RESTClientObject(configuration)
        self._call_seconds = call_seconds
        self._wall_clock = wall_clock
        self._ahead_seconds = 0.0

    @classmethod
    @asynccontextmanager
    async def connect(
        cls,
        kubeconfig: Path | None = None,
        context: str | None = None,
        call_seconds: float = CALL_SECONDS,
        wall_clock: Callable[[], float] = time.time,
    ) -> AsyncIterator[Kube]:
        """Connect as the pod's service account; outside a pod, or when one is named, by kubeconfig.

        Raises:
            KubeError: there is no usable configuration.
        """
        kube = cls(await _configuration(kubeconfig, context), call_seconds, wall_clock)
        try:
            yield kube
        finally:
            await kube.close()

    async def close(self) -> None:
        """Give the connections back."""
        await self._rest.close()

    def now(self) -> datetime:
        """The time, UTC, by the API server's clock, as its answers tell it."""
        return datetime.fromtimestamp(self._wall_clock() + self._ahead_seconds, UTC)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        """Read one object. Raises NotFound."""
        return await self._call(Request("get", kind, namespace, name))

    async def list(
        self,
        kind: Kind,
        namespace: str | None = None,
        selector: str = "",
        metadata_only: bool = False,
    ) -> Objects:
        """All objects of a kind, of one namespace or of all, that the label selector matches.

        `metadata_only` fetches only their metadata. Objects in a list say no kind or apiVersion.
        """
        query = {"limit": str(PAGE_SIZE)}
        if selector:
            query["labelSelector"] = selector
        accept = _METADATA_ONLY if metadata_only else "application/json"
        request = Request("list", kind, namespace, query=query, accept=accept)
        for _ in range(RESTARTS):
            with suppress(Gone):  # the pages came too slowly: they are of one moment
                return await self._pages(request)
        return await self._pages(request)

    async def create(
        self,
        kind: Kind,
        namespace: str | None,
        body: Json,
        *,
        dry_run: bool = False,
        strict: bool = False,
    ) -> Json:
        """Create an object; return it with what the server filled in.

        Args:
            dry_run: only check: admission runs, nothing is kept.
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
        return await self._call(
            Request("create", kind, namespace, about=name, query=query, body=body)
        )

    async def patch(
        self, kind: Kind, namespace: str | None, name: str, body: Json, *, subresource: str = ""
    ) -> Json:
        """Merge `body` into the object, None deleting a field; return the object.

        `metadata.uid` and `metadata.resourceVersion` in the body are preconditions, but servers
        pass over the uid at subresources: there it needs the version beside it.

        Raises:
            NotFound, Conflict (a precondition), Invalid, Forbidden.
        """
        preconditions = body.get("metadata", {})
        if subresource and "uid" in preconditions and not preconditions.get("resourceVersion"):
            raise ValueError(f"patch of {subresource}: resourceVersion must come with uid")
        query = {"fieldManager": FIELD_MANAGER}
        try:
            return await self._call(
                Request("patch", kind, namespace, name, subresource, query=query, body=body)
            )
        except Invalid as error:
            if all(cause.field != "metadata.uid" for cause in error.causes):
                raise
            # Elsewhere another uid is an attempt to change it.
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
        """Delete this very object, its children in the background, with its own grace.

        Returns:
            False when it was already gone, or when another object has its name.

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
            await self._call(Request("delete", kind, namespace, name, body=options))
        except NotFound:
            return False
        except Conflict:
            # No field of the answer says which of the two preconditions failed.
            if resource_version is None or not await self._is(kind, namespace, name, uid):
                return False
            raise
        return True

    async def _is(self, kind: Kind, namespace: str | None, name: str, uid: str) -> bool:
        try:
            found = await self.get(kind, namespace, name)
        except NotFound:
            return False
        return bool(found["metadata"]["uid"] == uid)

    async def _pages(self, request: Request) -> Objects:
        items: Objects = []
        while True:
            page = await self._call(request)
            items += page["items"] or ()
            token = page["metadata"].get("continue")
            if not token:
                return items
            request = replace(request, query={**request.query, "continue": token})

    async def _call(self, request: Request) -> Json:
        """The answer to a request, sent again while that is safe and its time lasts."""
        clock = asyncio.get_running_loop()
        deadline = clock.time() + self._call_seconds
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._send(request)
            except TimeoutError as error:
                message = f"no answer from {self._host} in {self._call_seconds:g} s"
                raise Unreachable(str(request), message) from error
            except TooManyRequests as error:  # it had no effect
                failure: KubeError = error
                pause = error.retry_after_seconds
            except Unreachable as error:
                # A write that got no answer may have happened; an answer is for the caller.
                if error.status or not request.read_only:
                    raise
                failure, pause = error, UNANSWERED_PAUSE_SECONDS
            if clock.time() + pause >= deadline:
                raise failure
            log.debug("%s is sent again in %.1f s: %s", request, pause, failure.message)
            await asyncio.sleep(pause)

    async def _send(self, request: Request) -> Json:
        headers = {"Accept": request.accept, "User-Agent": FIELD_MANAGER}
        if request.verb == "patch":
            headers["Content-Type"] = "application/merge-patch+json"
        # The token of a service account is read again here when it is a minute old.
        for setting in (await self._configuration.auth_settings()).values():
            headers[setting["key"]] = setting["value"]
        sent = self._wall_clock()
        try:
            answer = await self._rest.request(
                request.method,
                self._host + request.path,
                headers=headers,
                body=request.body,
                _request_timeout=_UNTIMED,
            )
            received = self._wall_clock()
            body: bytes = await answer.read()
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(str(request), f"{self._host}: {error!r}") from error
        if answer.status >= 400:
            raise error_of(str(request), answer.status, body, answer.headers)
        self._compare_clocks(answer.headers, sent, received)
        return _object(request, answer.status, body)

    def _compare_clocks(self, headers: Mapping[str, str], sent: float, received: float) -> None:
        """Only answers of the server itself count: what stands before it sends errors."""
        before = self._ahead_seconds
        ahead = self._ahead_seconds = ahead_seconds(before, headers, sent, received)
        if max(abs(ahead), abs(before)) >= TELLING_SECONDS and abs(ahead - before) >= 1.0:
            log.warning(
                "the clock of this machine is %.0f s %s the API server's, which is gone by",
                abs(ahead),
                "behind" if ahead > 0 else "ahead of",
            )


def _object(request: Request, status: int, body: bytes) -> Json:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Unreachable(str(request), "the answer is no object in JSON", status)
    return found


async def _configuration(kubeconfig: Path | None, context: str | None) -> Configuration:
    # With it each request would read proxies and ~/.netrc anew, in a thread.
    configuration = Configuration(client_session_kwargs={"trust_env": False})
    try:
        if kubeconfig is None and context is None:
            with suppress(ConfigException):  # not in a pod
                load_incluster_config(configuration)  # type: ignore[no-untyped-call]
                return configuration
        path = None if kubeconfig is None else str(kubeconfig)
        if kubeconfig is not None and not kubeconfig.is_file():
            raise KubeError("connect", f"no usable configuration: {kubeconfig} is not a file")
        await load_kube_config(  # type: ignore[no-untyped-call]
            path, context, client_configuration=configuration, persist_config=False
        )
    except ConfigException as error:
        raise KubeError("connect", f"no usable configuration: {error}") from error
    return configuration
