"""Rendezvous in this process: a gang's handlers and stores, without any server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from elasticjob_rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)


class MemoryStore:
    """Store with torch's interface, for threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self.timeout = timedelta(seconds=10)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        with self._changed:
            self._values[key] = value.encode() if isinstance(value, str) else value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self.set(key, str(total))
            return total

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = (timeout or self.timeout).total_seconds()
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), seconds):
                raise LookupError(f"no {keys} within {seconds:g} s")

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def keys(self) -> frozenset[str]:
        with self._changed:
            return frozenset(self._values)


@dataclass
class Gang:
    """Rounds of `least` to `most` nodes; a round begins when `wanted` of them wait."""

    least: int = 1
    most: int = 8
    wanted: int = 1
    round: int = 0
    waiting: list[MemoryHandler] = field(default_factory=list)
    seated: list[MemoryHandler] = field(default_factory=list)
    stores: list[MemoryStore] = field(default_factory=list)
    closed: bool = False
    gone: bool = False
    slow: float = 0.0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def handler(self, **options: Any) -> MemoryHandler:
        return MemoryHandler(self, **options)

    def form(self) -> None:
        """Begin a round if enough nodes wait and none runs in the last one."""
        if len(self.waiting) < self.wanted or any(h not in self.waiting for h in self.seated):
            return
        self.round += 1
        self.stores.append(MemoryStore())
        self.seated, self.waiting = self.waiting[: self.most], self.waiting[self.most :]
        for rank, handler in enumerate(self.seated):
            handler.place = (self.round, rank, len(self.seated))
        self.changed.notify_all()


class MemoryHandler(RendezvousHandler):
    def __init__(self, gang: Gang, seconds: float = 60.0) -> None:
        self._gang = gang
        self._seconds = seconds
        self._left = False
        self.place: tuple[int, int, int] | None = None
        self.calls: list[str] = []

    def get_backend(self) -> str:
        return "memory"

    def get_run_id(self) -> str:
        return "memories"

    def next_rendezvous(self) -> RendezvousInfo:
        gang = self._gang
        self.calls.append("next_rendezvous")
        with gang.changed:
            self.place = None
            gang.waiting.append(self)
            gang.form()
            settled = gang.changed.wait_for(
                lambda: self.place or gang.closed or self._left, self._seconds
            )
            if self in gang.waiting:
                gang.waiting.remove(self)
            if self._left:
                raise RendezvousGracefulExitError("left")
            if gang.closed:
                raise RendezvousClosedError("the gang is closed")
            if not settled or self.place is None:
                raise RendezvousTimeoutError(f"nobody came within {self._seconds:g} s")
            number, rank, nodes = self.place
            master = RendezvousStoreInfo("127.0.0.1", 29000 + number)
            return RendezvousInfo(gang.stores[number - 1], rank, nodes, master, number - 1)

    def is_closed(self) -> bool:
        return self._gang.closed

    def set_closed(self) -> None:
        time.sleep(self._gang.slow)
        self.calls.append("set_closed")
        with self._gang.changed:
            self._gang.closed = True
            self._gang.changed.notify_all()

    def num_nodes_waiting(self) -> int:
        if self._gang.gone:
            raise RendezvousConnectionError("the store is gone")
        with self._gang.changed:
            return len(self._gang.waiting)

    def leave(self) -> None:
        self.calls.append("leave")
        with self._gang.changed:
            self._left = True
            if self in self._gang.seated:
                self._gang.seated.remove(self)
            self._gang.form()
            self._gang.changed.notify_all()

    def shutdown(self) -> bool:
        self.calls.append("shutdown")
        self.leave()
        return True


def until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain for {what}"
        time.sleep(0.01)
