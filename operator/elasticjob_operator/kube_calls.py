"""Requests to the API server and their answers: each ends within its time.

What is safe to send again is sent again within that time, nothing else. The answers tell the
server's time too.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes.aio.client import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from elasticjob_operator.core.server_time import TELLING_SECONDS, ahead_seconds
from elasticjob_operator.kube_errors import (
    KubeError,
    TooManyRequests,
    Unreachable,
    error_of,
)
from elasticjob_operator.kube_request import Json, Request

log = logging.getLogger(__name__)

UNANSWERED_PAUSE_SECONDS = 0.2
FIELD_MANAGER = "elasticjob-operator"
_UNTIMED = aiohttp.ClientTimeout(total=None)  # the whole call has its time, see `call`


class Calls:
    """Makes requests of one API server. `wall_clock` is this machine's, in seconds."""

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
        """Give the connections back."""
        await self._rest.close()

    def now(self) -> datetime:
        """The time, UTC, by the API server's clock, as its answers tell it."""
        return datetime.fromtimestamp(self._wall_clock() + self._ahead_seconds, UTC)

    async def call(self, request: Request) -> Json:
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


async def configuration(kubeconfig: Path | None, context: str | None) -> Configuration:
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
