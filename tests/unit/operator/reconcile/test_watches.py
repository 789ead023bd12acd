"""End of kopf's watches at a signal."""

from __future__ import annotations

import asyncio
import signal
import socket
from typing import Any

import kopf

from elasticjob_operator.reconcile.watches import StopSignals, watch


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
        watching = asyncio.create_task(
            watch(found, "test", StopSignals(), clusterwide=True, stop_flag=stop)
        )
        while len(asyncio.all_tasks()) < 3:
            await asyncio.sleep(0)
        other = asyncio.create_task(asyncio.Event().wait())
        stop.set()
        await watching
        return not other.done()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert asyncio.run(stopped(silent_server(listening)))


def test_further_signals_neither_fail_nor_delay_the_end() -> None:
    async def errors(found: kopf.OperatorRegistry) -> list[dict[str, Any]]:
        raised: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: raised.append(context))
        watching = asyncio.create_task(watch(found, "test", StopSignals(), clusterwide=True))
        while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            await asyncio.sleep(0)
        for signum in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(signum)
        await watching
        delivered = asyncio.Event()
        signal.raise_signal(signal.SIGTERM)
        loop.add_signal_handler(signal.SIGUSR1, delivered.set)
        signal.raise_signal(signal.SIGUSR1)  # handled after the one before
        await delivered.wait()
        return raised

    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert asyncio.run(errors(silent_server(listening))) == []


def test_second_signal_is_received_also_after_the_end() -> None:
    async def seen(found: kopf.OperatorRegistry) -> tuple[bool, bool]:
        signals = StopSignals()
        watching = asyncio.create_task(watch(found, "test", signals, clusterwide=True))
        while signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            await asyncio.sleep(0)
        signal.raise_signal(signal.SIGTERM)
        await watching
        before = signals.second.is_set()
        signal.raise_signal(signal.SIGINT)
        async with asyncio.timeout(60):
            await signals.second.wait()
        return before, signals.second.is_set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert asyncio.run(seen(silent_server(listening))) == (False, True)
