"""How often and until when one call is sent."""

from __future__ import annotations

import asyncio
from typing import Any, Self

import grpc
import pytest

from elasticjob_rendezvous.etcd.auth import Token
from elasticjob_rendezvous.etcd.errors import Unavailable
from elasticjob_rendezvous.etcd.transport import Transport

TIMEOUT_SECONDS = 0.4


class OneLink:
    """An endpoint that is always connected, and the links of a client that has only it."""

    url = "http://etcd"

    @property
    def endpoint(self) -> Self:
        return self

    def current(self) -> Self:
        return self

    def __len__(self) -> int:
        return 1

    def is_settled(self) -> bool:
        return True

    async def failed(self, link: object) -> None: ...


@pytest.mark.parametrize("repeatable", [True, False])
def test_a_refused_write_is_not_sent_again_when_its_time_is_nearly_over(repeatable: bool) -> None:
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


def test_a_request_that_changes_of_users_overtake_is_sent_until_its_time_is_over() -> None:
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
        # Nothing was changed, and nobody was refused: it is no matter of user and password.
        with pytest.raises(Unavailable, match="auth store is old"):
            await transport.call("put", overtaken, repeatable=False)

    asyncio.run(main())
