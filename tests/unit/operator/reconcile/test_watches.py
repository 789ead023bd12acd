"""End of kopf's watches at a signal."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import kopf

from elasticjob_operator.reconcile.watches import watch


def silent_server(listening: socket.socket) -> kopf.OperatorRegistry:
    """Return a registry that logs in to an API server without answers."""
    found = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(server=f"http://127.0.0.1:{listening.getsockname()[1]}")

    kopf.on.login(registry=found)(login)
    return found


def test_end_of_the_watches_neither_waits_for_tasks_of_others_nor_cancels_them() -> None:
    """kopf takes each task that began after it for one of its own."""

    async def stopped(found: kopf.OperatorRegistry) -> bool:
        stop = asyncio.Event()
        watching = asyncio.create_task(watch(found, "test", clusterwide=True, stop_flag=stop))
        while len(asyncio.all_tasks()) < 3:
            await asyncio.sleep(0)
        other = asyncio.create_task(asyncio.Event().wait())
        stop.set()
        await watching
        return not other.done()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert asyncio.run(stopped(silent_server(listening)))
