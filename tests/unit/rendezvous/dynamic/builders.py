"""Builders for the tests of the dynamic rendezvous."""

from __future__ import annotations

import threading
from datetime import UTC, datetime, timedelta
from typing import Any

from elasticjob_rendezvous.dynamic.core.decisions import Situation
from elasticjob_rendezvous.dynamic.core.settings import RendezvousSettings, RendezvousTimeout
from elasticjob_rendezvous.dynamic.core.state import NodeDesc, State
from elasticjob_rendezvous.dynamic.ports import RendezvousBackend, Token

UTC_NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def settings(
    min_nodes: int = 2,
    max_nodes: int = 3,
    last_call_seconds: float = 30,
    interval_seconds: float = 5,
    join_seconds: float = 600,
) -> RendezvousSettings:
    return RendezvousSettings(
        "run",
        min_nodes,
        max_nodes,
        RendezvousTimeout(
            join=timedelta(seconds=join_seconds), last_call=timedelta(seconds=last_call_seconds)
        ),
        timedelta(seconds=interval_seconds),
        3,
    )


def node(name: str) -> NodeDesc:
    return NodeDesc(name, 1, 0)


def nodes(names: str) -> list[NodeDesc]:
    return [node(name) for name in names]


def state(participants: str = "", waits: str = "", spare: str = "", **fields: Any) -> State:
    """Return a state of live nodes named by one letter each; ranks are given if complete."""
    named = nodes(participants + waits + spare)
    ranked = {n: i if fields.get("complete") else 0 for i, n in enumerate(nodes(participants))}
    fields.setdefault("last_heartbeats", dict.fromkeys(named, UTC_NOW))
    return State(
        participants=ranked,
        wait_list=frozenset(nodes(waits)),
        redundancy_list=frozenset(nodes(spare)),
        **fields,
    )


def situation(of: State, name: str = "a", **fields: Any) -> Situation:
    base: dict[str, Any] = {
        "node": node(name),
        "state": of,
        "settings": settings(),
        "now": 100.0,
        "utc": UTC_NOW,
        "deadline": 200.0,
    }
    return Situation(**{**base, **fields})


class MemoryBackend(RendezvousBackend):
    """In-memory compare-and-set; it counts requests, and fails the next ones on request."""

    def __init__(self, reconnects: bool = False) -> None:
        self.reconnects = reconnects
        self.stored: tuple[bytes, int] | None = None
        self.fails: list[Exception] = []
        self.gets = self.sets = 0
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return "memory"

    def get_state(self) -> tuple[bytes, Token] | None:
        self.gets += 1
        self._fail()
        return self.stored

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        self.sets += 1
        self._fail()
        with self._lock:
            current = self.stored[1] if self.stored else None
            if current != token:
                return (*self.stored, False) if self.stored else None
            self.stored = (state, (current or 0) + 1)
            return (*self.stored, True)

    def _fail(self) -> None:
        if self.fails:
            raise self.fails.pop(0)


class MemoryStore:
    """Subset of a store that a handler needs."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)
