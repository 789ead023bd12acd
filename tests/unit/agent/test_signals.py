"""Which signals are heard, and what they do before and after that."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from elasticjob_agent.signals import SIGNALS, Signals, heeded


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = {signum: signal.getsignal(signum) for signum in SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def test_each_is_heard_and_its_own_handler_comes_back() -> None:
    async def listen() -> list[signal.Signals]:
        heard: asyncio.Queue[signal.Signals] = asyncio.Queue()
        with heeded(heard.put_nowait):
            for signum in SIGNALS:
                os.kill(os.getpid(), signum)
            async with asyncio.timeout(10):
                return [await heard.get() for _ in SIGNALS]

    def own(*_: object) -> None:
        raise AssertionError("not while they are heeded")

    signal.signal(signal.SIGTERM, own)
    assert set(asyncio.run(listen())) == set(SIGNALS)
    assert signal.getsignal(signal.SIGTERM) is own


def test_a_process_that_only_ends_hears_none() -> None:
    async def end() -> None:
        with heeded(lambda _: None, to_the_end=True):
            pass
        for signum in SIGNALS:
            assert signal.getsignal(signum) == signal.SIG_IGN

    asyncio.run(end())


def test_nohup_is_heeded() -> None:
    async def look() -> None:
        with heeded(lambda _: None):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asyncio.run(look())


def test_a_second_ctrl_c_is_a_hurry_also_within_itself() -> None:
    async def listen() -> tuple[list[tuple[str, bool]], signal.Signals | None]:
        asked: list[tuple[str, bool]] = []
        signals = Signals(lambda name, hurry: asked.append((name, hurry)))
        with signals.heeded():
            for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGINT):
                with signals.heeded():
                    os.kill(os.getpid(), signum)
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
        return asked, signals.last

    asked, last = asyncio.run(listen())
    assert asked == [("SIGTERM", False), ("SIGINT", False), ("SIGINT", True)]
    assert last is signal.SIGINT
