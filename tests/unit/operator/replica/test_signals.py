"""End of a process whose tasks do not end."""

from __future__ import annotations

import asyncio
import threading

import pytest

from elasticjob_operator.replica import signals


def test_task_that_ignores_its_cancellation_does_not_keep_a_failed_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    aborted = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            async with asyncio.timeout(30):
                while not aborted.is_set():
                    await asyncio.sleep(0.01)

    async def serve() -> None:
        serve.left = asyncio.create_task(endless())  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        raise RuntimeError("failed")

    monkeypatch.setattr(signals, "EXIT_SECONDS", 0.01)
    assert signals.run_until_signal(serve, abort=aborted.set) == 1
    assert aborted.is_set()
    assert "tasks did not end" in caplog.text


def test_process_whose_tasks_end_is_not_aborted() -> None:
    before = threading.active_count()

    async def serve() -> None:
        assert threading.active_count() == before

    assert signals.run_until_signal(serve, abort=pytest.fail) == 0
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(30)
            assert not thread.is_alive(), "the timer is cancelled"
