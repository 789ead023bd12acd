"""Requests to the API server: timeouts, safe retries, the server's clock.

Only requests that are safe to repeat are retried, within the timeout.

A pod's age is the present time minus its `creationTimestamp`, which the API server sets. If the
operator's clock differed from the API server's by more than `pendingTimeoutSeconds`, a new pod
would be replaced immediately, or a pod that never starts would never be replaced. The present time
therefore follows the clock that the responses show.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from random import random
from typing import Any
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from elasticjob_operator.kubernetes.errors import (
    KubeError,
    QuotaConflict,
    TooLarge,
    TooManyRequests,
    Unreachable,
    error_of,
)
from elasticjob_operator.kubernetes.kinds import Json, Kind
from elasticjob_operator.model.job import FIELD_MANAGER

log = logging.getLogger(__name__)

LOGGED_OFFSET_SECONDS = 5.0
"""Minimum clock difference that is logged, in seconds."""
_METHODS = {"get": "GET", "list": "GET", "create": "POST", "patch": "PATCH", "delete": "DELETE"}
UNANSWERED_PAUSE_SECONDS = 0.2
QUOTA_SECONDS = 2.0
"""Time for which a request that conflicts with others over a ResourceQuota is retried."""
MAX_BODY_BYTES = 16 << 20
"""Maximum size of a response. An object has at most 1.5 MiB, the limit of the API server's etcd."""
_UNTIMED = aiohttp.ClientTimeout(total=None)  # `call` has the timeout


def clock_offset_seconds(
    known: float, headers: Mapping[str, str], sent: float, received: float
) -> float:
    """Return the seconds by which the API server's clock is ahead; negative if it is behind.

    `known`, the previous estimate, changes only as far as this response requires, so that it stays
    0 for synchronized clocks. The response's `Date` is its time of creation, truncated to a second,
    which lies between `sent` and `received` by the operator's clock.
    """
    date = _parse_date(headers.get("Date", ""))
    if date is None:
        return known
    least, most = date - received, date + 1.0 - sent
    return min(max(known, least), most)


def _parse_date(date: str) -> float | None:
    """Parse a date into seconds since 1970; None if it is malformed."""
    try:
        found = parsedate_to_datetime(date)
    except ValueError:
        return None
    return found.replace(tzinfo=found.tzinfo or UTC).timestamp()


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Args:
        about: object missing from the path, as in a create.
        seconds: timeout of the answer; None for the client's. Retries end at the client's timeout.
    """

    verb: str
    kind: Kind
    namespace: str | None
    name: str = ""
    subresource: str = ""
    about: str = ""
    query: Mapping[str, str] = field(default_factory=dict)
    accept: str = "application/json"
    body: Json | None = None
    seconds: float | None = None

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


class Calls:
    """Sender of requests to one API server. `wall_clock` is this machine's, in seconds."""

    def __init__(
        self,
        configuration: Configuration,
        call_seconds: float,
        wall_clock: Callable[[], float],
    ) -> None:
        self._configuration: Any = configuration
        self._host = configuration.host.rstrip("/")
        self._rest: Any = RESTClientObject(configuration)
        self._call_seconds = call_seconds
        self._wall_clock = wall_clock
        self._ahead_seconds = 0.0

    async def close(self) -> None:
        """Close the connections."""
        await self._rest.close()

    def now(self) -> datetime:
        """Return the UTC time of the API server's clock, estimated from its responses."""
        return datetime.fromtimestamp(self._wall_clock() + self._ahead_seconds, UTC)

    async def call(self, request: Request) -> Json:
        """Return the response to a request, retried while that is safe and time is left."""
        clock = asyncio.get_running_loop()
        began = clock.time()
        seconds = self._call_seconds if request.seconds is None else request.seconds
        deadline = began + seconds
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    return await self._send(request)
            except TimeoutError as error:
                message = f"no answer from {self._host} in {seconds:g} s"
                raise Unreachable(str(request), message) from error
            except TooManyRequests as error:  # it had no effect
                failure: KubeError = error
                pause = error.retry_after_seconds
            except QuotaConflict as error:  # it had no effect, and competes with others
                failure, pause = error, UNANSWERED_PAUSE_SECONDS * (0.5 + random())
                if clock.time() >= began + QUOTA_SECONDS:
                    raise  # a lasting conflict must not keep other jobs waiting
            except Unreachable as error:
                # An unanswered write may have happened; an error response is the caller's.
                if error.status or not request.read_only:
                    raise
                failure, pause = error, UNANSWERED_PAUSE_SECONDS
            if clock.time() + pause >= began + self._call_seconds:
                raise failure
            log.debug("%s: retry in %.1f s: %s", request, pause, failure.message)
            await asyncio.sleep(pause)

    async def _send(self, request: Request) -> Json:
        headers = {"Accept": request.accept, "User-Agent": FIELD_MANAGER}
        if request.verb == "patch":
            headers["Content-Type"] = "application/merge-patch+json"
        try:
            # This reads a service account's token again when it is a minute old.
            for setting in (await self._configuration.auth_settings()).values():
                headers[setting["key"]] = setting["value"]
        except (ConfigException, OSError) as error:
            raise Unreachable(str(request), f"cannot read the credentials: {error}") from error
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
            body = await _read(request, answer.response)
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(str(request), f"{self._host}: {error!r}") from error
        if answer.status >= 400:
            raise error_of(str(request), answer.status, body, answer.headers)
        self._compare_clocks(answer.headers, sent, received)
        return _object(request, answer.status, body)

    def _compare_clocks(self, headers: Mapping[str, str], sent: float, received: float) -> None:
        """Update the clock offset from a successful response; a proxy may have sent an error."""
        before = self._ahead_seconds
        ahead = self._ahead_seconds = clock_offset_seconds(before, headers, sent, received)
        if max(abs(ahead), abs(before)) >= LOGGED_OFFSET_SECONDS and abs(ahead - before) >= 1.0:
            log.warning(
                "this machine's clock is %.0f s %s the API server's; using the API server's time",
                abs(ahead),
                "behind" if ahead > 0 else "ahead of",
            )


class _Response(aiohttp.ClientResponse):
    """Response whose connection ends at once if it is closed before its end.

    A TLS connection otherwise waits for the server's end of the session: for 30 s if the server is
    silent, and beyond the end of the event loop.
    """

    def close(self) -> None:
        """Abort the connection."""
        connection = self.connection
        if connection is not None and connection.transport is not None:
            connection.transport.abort()
        super().close()


async def _read(request: Request, response: aiohttp.ClientResponse) -> bytes:
    """Read the body. Raises `TooLarge`."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MAX_BODY_BYTES:
            response.close()
            message = f"the response exceeds {MAX_BODY_BYTES >> 20} MiB"
            raise TooLarge(str(request), message, response.status)
    return b"".join(parts)


def _object(request: Request, status: int, body: bytes) -> Json:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Unreachable(str(request), "the response is not a JSON object", status)
    return found


async def load_configuration(kubeconfig: Path | None, context: str | None) -> Configuration:
    # With trust_env each request would read proxy settings and ~/.netrc again, in a thread.
    session = {"trust_env": False, "response_class": _Response}
    configuration = Configuration(client_session_kwargs=session)
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
