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

    async def settled(self) -> None: ...

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
