"""Client of the API server against one that sheds load, hangs up, stalls or talks nonsense."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote_plus

import pytest
from kubernetes.aio.client import Configuration
from kubernetes.aio.config.incluster_config import (
    SERVICE_HOST_ENV_NAME,
    SERVICE_PORT_ENV_NAME,
    InClusterConfigLoader,
)

from elasticjob_operator.kubernetes.client import (
    PODS,
    Conflict,
    Gone,
    Invalid,
    Kube,
    KubeError,
    NoSuchKind,
    QuotaConflict,
    TooManyRequests,
    Unauthorized,
    Unreachable,
)
from tests.integration.etcd_server import Ports

HANG_UP = b""
STALL = b"stall"
FOUND = {"metadata": {"name": "x", "uid": "uid"}}


def answer(status: int, body: Any, **headers: str) -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(content)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


def failure(status: int, reason: str, message: str = "no", **details: Any) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "reason": reason,
        "message": message,
        "details": details,
        "code": status,
    }


def page(*names: str, token: str = "") -> dict[str, Any]:
    return {"metadata": {"continue": token}, "items": [{"metadata": {"name": n}} for n in names]}


class Scripted:
    """Server with scripted answers, the last one repeated; it records the requests."""

    def __init__(self, *answers: bytes) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().lower().splitlines()
                sizes = [int(line[15:]) for line in lines if line.startswith("content-length:")]
                await reader.readexactly(sum(sizes))
                self.asked.append(head.decode().splitlines()[0].removesuffix(" HTTP/1.1"))
                said = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
                if said == HANG_UP:
                    break
                if said == STALL:
                    await reader.read()
                    break
                writer.write(said)
        except asyncio.IncompleteReadError:
            pass  # the client has gone
        finally:
            writer.close()


def run(
    server: Scripted, scenario: Callable[[Kube], Awaitable[None]], call_seconds: float = 5.0
) -> None:
    async def main() -> None:
        listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
        async with listening:
            port = listening.sockets[0].getsockname()[1]
            kube = Kube(Configuration(host=f"http://127.0.0.1:{port}"), call_seconds)
            try:
                await scenario(kube)
            finally:
                await kube.close()

    asyncio.run(main())


GET = "GET /api/v1/namespaces/ns/pods/x"


def test_throttled_request_is_retried_after_given_delay() -> None:
    shed = failure(429, "TooManyRequests")
    server = Scripted(answer(429, shed, Retry_After="1"), answer(200, FOUND))

    async def scenario(kube: Kube) -> None:
        begin = time.monotonic()
        assert await kube.patch(PODS, "ns", "x", {}) == FOUND
        assert 1.0 <= time.monotonic() - begin < 30.0, "half of the call's timeout"
        assert len(server.asked) == 2

    run(server, scenario, call_seconds=60.0)


def test_throttling_beyond_call_timeout_fails_at_once() -> None:
    shed = failure(429, "TooManyRequests", "slow down", retryAfterSeconds=7)
    server = Scripted(answer(429, shed))

    async def scenario(kube: Kube) -> None:
        with pytest.raises(TooManyRequests, match="slow down") as found:
            await kube.create(PODS, "ns", {})
        assert (found.value.retry_after_seconds, found.value.retryable) == (7.0, True)
        assert len(server.asked) == 1

    run(server, scenario)


QUOTA = (
    'Operation cannot be fulfilled on resourcequotas "pods": the object has been modified; please '
    "apply your changes to the latest version and try again"
)


@pytest.mark.parametrize("details", [{}, {"kind": "resourcequotas", "name": "pods"}])
def test_conflict_over_a_quota_is_retried_until_the_timeout(details: dict[str, str]) -> None:
    lost = answer(409, failure(409, "Conflict", QUOTA, **details))
    server = Scripted(lost, lost, answer(201, FOUND), lost)

    async def scenario(kube: Kube) -> None:
        assert await kube.create(PODS, "ns", {}) == FOUND
        assert len(server.asked) == 3
        with pytest.raises(QuotaConflict, match="cannot be fulfilled on resourcequotas"):
            await kube.create(PODS, "ns", {})
        assert len(server.asked) > 4

    run(server, scenario, call_seconds=2.0)


def test_conflict_over_an_object_is_not_retried() -> None:
    lost = failure(409, "Conflict", QUOTA.replace("resourcequotas", "pods"), kind="pods", name="x")
    server = Scripted(answer(409, lost))

    async def scenario(kube: Kube) -> None:
        with pytest.raises(Conflict) as found:
            await kube.patch(PODS, "ns", "x", {})
        assert not found.value.retryable
        assert len(server.asked) == 1

    run(server, scenario)


def test_unreadable_service_account_token_is_an_expected_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a job would be set aside, as for a defect of the operator."""
    token, ca = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("t")
    ca.write_text("c")
    loader = InClusterConfigLoader(
        str(token), str(ca), environ={SERVICE_HOST_ENV_NAME: "host", SERVICE_PORT_ENV_NAME: "1"}
    )
    monkeypatch.setattr(loader, "_token_refresh_period", timedelta(0))
    server = Scripted(answer(200, FOUND))

    async def scenario(kube: Kube) -> None:
        configuration = kube._calls._configuration
        host, certificates = configuration.host, configuration.ssl_ca_cert
        loader.load_and_set(configuration)
        configuration.host, configuration.ssl_ca_cert = host, certificates
        assert await kube.get(PODS, "ns", "x") == FOUND
        token.write_text("")
        with pytest.raises(Unreachable, match="cannot read the credentials: Token file exists"):
            await kube.create(PODS, "ns", {})
        token.unlink()
        with pytest.raises(Unreachable, match=r"cannot read the credentials: .*No such file"):
            await kube.create(PODS, "ns", {})
        token.write_text("t")
        assert await kube.get(PODS, "ns", "x") == FOUND

    run(server, scenario)


@pytest.mark.parametrize("said", ["Wed, 21 Oct 2026 07:28:00 GMT", "-5"])
def test_invalid_retry_after_is_tolerated(said: str) -> None:
    shed = failure(429, "TooManyRequests")
    server = Scripted(answer(429, shed, Retry_After=said), answer(200, FOUND))

    async def scenario(kube: Kube) -> None:
        assert await kube.get(PODS, "ns", "x") == FOUND

    run(server, scenario)


def test_dropped_connection_repeats_reads_but_not_writes() -> None:
    # aiohttp itself repeats idempotent requests, once on each connection that it kept.
    server = Scripted(answer(200, FOUND), HANG_UP, HANG_UP, answer(200, FOUND))

    async def reading(kube: Kube) -> None:
        for _ in range(2):
            assert await kube.get(PODS, "ns", "x") == FOUND
        assert server.asked == [GET] * 4

    run(server, reading)
    server = Scripted(HANG_UP, answer(200, FOUND))

    async def writing(kube: Kube) -> None:
        with pytest.raises(Unreachable) as found:
            await kube.patch(PODS, "ns", "x", {})
        assert found.value.retryable
        assert len(server.asked) == 1

    run(server, writing)


def test_stalled_server_fails_call_at_its_timeout() -> None:
    async def scenario(kube: Kube) -> None:
        for call in (kube.get(PODS, "ns", "x"), kube.list(PODS), kube.create(PODS, "ns", {})):
            begin = time.monotonic()
            with pytest.raises(Unreachable, match=r"in 0\.3 s"):
                await call
            assert 0.3 <= time.monotonic() - begin < 10

    run(Scripted(STALL), scenario, call_seconds=0.3)


def test_refused_connection_is_unreachable() -> None:
    ports = Ports(1)  # bound, but not listening

    async def main() -> None:
        kube = Kube(Configuration(host=f"http://127.0.0.1:{ports.numbers[0]}"), call_seconds=0.5)
        try:
            for call in (kube.get(PODS, "ns", "x"), kube.create(PODS, "ns", {})):
                with pytest.raises(Unreachable, match=str(ports.numbers[0])):
                    await call
        finally:
            await kube.close()

    try:
        asyncio.run(main())
    finally:
        ports.close()


def test_list_with_expired_continue_token_restarts() -> None:
    expired = answer(410, failure(410, "Expired"))
    first = answer(200, page("a", token="more/+="))
    server = Scripted(first, expired, first, answer(200, page("b")))

    async def scenario(kube: Kube) -> None:
        found = await kube.list(PODS, "ns", selector="a=b,c in (d)")
        assert [one["metadata"]["name"] for one in found] == ["a", "b"]

    run(server, scenario)
    asked = [unquote_plus(line) for line in server.asked]
    begin = "GET /api/v1/namespaces/ns/pods?limit=500&labelSelector=a=b,c in (d)"
    rest = f"{begin}&continue=more/+="
    assert asked == [begin, rest, begin, rest]


def test_list_with_repeatedly_expired_tokens_fails() -> None:
    server = Scripted(answer(410, failure(410, "Expired", "too old")))

    async def scenario(kube: Kube) -> None:
        with pytest.raises(Gone, match="too old"):
            await kube.list(PODS)

    run(server, scenario)
    assert 2 <= len(server.asked) < 10


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (answer(500, failure(500, "InternalError", "failed calling webhook")), Unreachable),
        (answer(503, failure(503, "ServiceUnavailable")), Unreachable),
        (answer(504, failure(504, "Timeout")), Unreachable),
        (answer(502, b"<html>Bad gateway</html>"), Unreachable),
        (answer(413, b"too large"), Invalid),
        (answer(401, failure(401, "Unauthorized")), Unauthorized),
        (answer(404, b"404 page not found\n"), NoSuchKind),
        (answer(405, failure(405, "MethodNotAllowed")), KubeError),
    ],
)
def test_failure_status_is_passed_to_caller(said: bytes, kind: type[KubeError]) -> None:
    server = Scripted(said)

    async def scenario(kube: Kube) -> None:
        with pytest.raises(KubeError) as found:
            await kube.get(PODS, "ns", "x")
        assert type(found.value) is kind
        assert len(server.asked) == 1

    run(server, scenario)


@pytest.mark.parametrize("said", [answer(200, b"<html>Log in</html>"), answer(200, b"[1]")])
def test_invalid_answer_raises_specific_error(said: bytes) -> None:
    async def scenario(kube: Kube) -> None:
        with pytest.raises(Unreachable, match="not a JSON object"):
            await kube.get(PODS, "ns", "x")

    run(Scripted(said), scenario)
