"""Requests to the API server with a timeout and safe retries.

Only requests that are safe to repeat are retried, within the timeout. The responses also give the
server's time.
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
_UNTIMED = aiohttp.ClientTimeout(total=None)  # `call` has the timeout


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
                # An unanswered write may have happened; an error response is the caller's.
                if error.status or not request.read_only:
                    raise
                failure, pause = error, UNANSWERED_PAUSE_SECONDS
            if clock.time() + pause >= deadline:
                raise failure
            log.debug("%s: retry in %.1f s: %s", request, pause, failure.message)
            await asyncio.sleep(pause)

    async def _send(self, request: Request) -> Json:
        headers = {"Accept": request.accept, "User-Agent": FIELD_MANAGER}
        if request.verb == "patch":
            headers["Content-Type"] = "application/merge-patch+json"
        # This reads a service account's token again when it is a minute old.
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
        """Update the clock offset from a successful response; a proxy may have sent an error."""
        before = self._ahead_seconds
        ahead = self._ahead_seconds = ahead_seconds(before, headers, sent, received)
        if max(abs(ahead), abs(before)) >= TELLING_SECONDS and abs(ahead - before) >= 1.0:
            log.warning(
                "this machine's clock is %.0f s %s the API server's; using the API server's time",
                abs(ahead),
                "behind" if ahead > 0 else "ahead of",
            )


def _object(request: Request, status: int, body: bytes) -> Json:
    try:
        found = json.loads(body)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Unreachable(str(request), "the response is not a JSON object", status)
    return found


async def configuration(kubeconfig: Path | None, context: str | None) -> Configuration:
    # With trust_env each request would read proxy settings and ~/.netrc again, in a thread.
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
