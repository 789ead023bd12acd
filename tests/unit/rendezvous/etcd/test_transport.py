"""Retries and deadline of one call."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, Self

import grpc
import pytest

from elasticjob_rendezvous.etcd.endpoints import Metadata, Token
from elasticjob_rendezvous.etcd.errors import Ambiguous, Unavailable
from elasticjob_rendezvous.etcd.transport import Transport

TIMEOUT_SECONDS = 0.4


class OneLink:
    """Client link with a single endpoint that is always connected."""

    url = "http://etcd"

    @property
    def endpoint(self) -> Self:
        return self

    def current(self) -> Self:
        return self

    def __len__(self) -> int:
        return 1

    def is_connected(self) -> bool:
        return True

    def is_settled(self) -> bool:
        return True

    async def failed(self, link: object) -> None: ...


@pytest.mark.parametrize("repeatable", [True, False])
def test_refused_write_is_not_repeated_near_its_timeout(repeatable: bool) -> None:
    async def main() -> None:
        begin = asyncio.get_running_loop().time()
        sent_at: list[float] = []

        async def refused(link: object, metadata: object, timeout_seconds: float) -> None:
            sent_at.append(asyncio.get_running_loop().time() - begin)
            initial = trailing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.UNAVAILABLE, initial, trailing, "etcdserver: no leader"
            )

        links: Any = OneLink()
        transport = Transport(links, Token(None, None), TIMEOUT_SECONDS, random=lambda: 0.0)
        with pytest.raises(Unavailable, match="no leader"):
            await transport.call("put", refused, repeatable=repeatable)
        # The waits add up to 0.025, 0.075, 0.175 and 0.375 s.
        assert 1 < len(sent_at) <= (5 if repeatable else 4), sent_at

    asyncio.run(main())


def test_request_overtaken_by_user_changes_is_repeated_until_its_timeout() -> None:
    async def main() -> None:
        overtaken_times = 4

        async def overtaken(link: object, metadata: object, timeout_seconds: float) -> str:
            nonlocal overtaken_times
            if not overtaken_times:
                return "done"
            overtaken_times -= 1
            initial = trailing = grpc.aio.Metadata()
            detail = "etcdserver: revision of auth store is old"
            raise grpc.aio.AioRpcError(grpc.StatusCode.INVALID_ARGUMENT, initial, trailing, detail)

        links: Any = OneLink()
        transport = Transport(links, Token(None, None), TIMEOUT_SECONDS, random=lambda: 0.0)
        assert await transport.call("put", overtaken, repeatable=False) == "done"
        overtaken_times = 1000
        # Nothing was changed or refused: the cause is not user and password.
        with pytest.raises(Unavailable, match="auth store is old"):
            await transport.call("put", overtaken, repeatable=False)

    asyncio.run(main())


class Guarded(OneLink):
    """Link that issues the tokens 1, 2, 3, …"""

    def __init__(self) -> None:
        self.tokens = 0

    @property
    def auth(self) -> Self:
        return self

    async def Authenticate(self, request: object, timeout: float) -> object:
        self.tokens += 1
        return SimpleNamespace(token=str(self.tokens))


@pytest.mark.parametrize(
    ("code", "detail", "again"),
    [
        (grpc.StatusCode.UNKNOWN, "Stream removed (Deadline Exceeded)", "2"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", "2"),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", "2"),
        (grpc.StatusCode.UNAVAILABLE, "etcdserver: request timed out", "1"),
        (grpc.StatusCode.UNAVAILABLE, "etcdserver: no leader", "1"),
    ],
)
@pytest.mark.parametrize("repeatable", [True, False])
def test_token_without_an_answer_is_not_used_again(
    code: grpc.StatusCode, detail: str, again: str, repeatable: bool
) -> None:
    """etcd delays requests whose token names a log position that it has not reached."""

    async def main() -> None:
        used: list[str] = []

        async def request(link: object, metadata: Metadata, timeout_seconds: float) -> None:
            used.append(dict(metadata)["token"])
            if len(used) == 1:
                await asyncio.sleep(timeout_seconds)  # so it is not sent again by itself
                raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), detail)

        links: Any = Guarded()
        transport = Transport(links, Token("job", "pass"), TIMEOUT_SECONDS, random=lambda: 0.0)
        with pytest.raises((Unavailable, Ambiguous)):
            await transport.call("put", request, repeatable=repeatable)
        await transport.call("put", request, repeatable=repeatable)
        assert used == ["1", again]

    asyncio.run(main())
