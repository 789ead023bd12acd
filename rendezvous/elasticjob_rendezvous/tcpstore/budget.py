"""Memory of the messages that a server is reading or sending. No I/O besides waiting."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator


class Budget:
    """Budget of `max_bytes` for all connections; a larger request waits until it is alone."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used = 0
        self._freed = asyncio.Event()

    @contextlib.contextmanager
    def hold(self) -> Iterator[Hold]:
        """Return the share of one request, which ends with the block."""
        hold = Hold(self)
        try:
            yield hold
        finally:
            hold.release()

    async def take(self, own: int, size: int) -> None:
        """Wait for room for `size` bytes beside the `own` that the same request holds."""
        while self._used > own and self._used + size > self._max_bytes:
            self._freed.clear()
            await self._freed.wait()
        self._used += size

    def give(self, size: int) -> None:
        self._used -= size
        self._freed.set()


class Hold:
    """Share of one request in a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._size = 0
        self._needed = 0

    async def grow(self, size: int, ahead: int = 0) -> None:
        """Wait for room for `size` bytes more, and for `ahead` bytes that later calls then use."""
        wanted = self._needed + size + ahead
        if wanted > self._size:
            await self._budget.take(self._size, wanted - self._size)
            self._size = wanted
        self._needed += size

    def release(self) -> None:
        """Give back the whole share."""
        self._needed = 0
        if self._size:
            self._budget.give(self._size)
            self._size = 0
