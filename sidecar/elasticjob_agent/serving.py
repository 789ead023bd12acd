"""Report of an agent about its job at `GET /rendezvous`; with etcd v3 only store problems.

Keeps the records of `core.recorded` for the health server, and delays the agent's end until a
reader has seen the job's outcome. Format: `elasticjob_rendezvous.core.served`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from elasticjob_agent.core.following import Following
from elasticjob_agent.core.recorded import Recorded, recorded, records
from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.config import Identity
from elasticjob_rendezvous.core.records import RoundState
from elasticjob_rendezvous.core.served import SETUP, Served, proven, served, written
from elasticjob_rendezvous.core.store_trouble import StoreTrouble

STAY_SECONDS = 10.0
"""Maximum time to wait at the end for a reader, if there has been one lately."""
READING_SECONDS = 30.0
"""Maximum age of the last request of a reader that is expected to read again."""


class Witness:
    """Reporter of one agent's view of its job.

    Args:
        who: identity of this agent's node.
        job_key: key that readers must prove to have; empty allows every reader.
        setting_up: returns True before a joinable rendezvous exists.
    """

    def __init__(
        self,
        who: Identity,
        session: str,
        prefix: str,
        bounds: Bounds,
        backend: str,
        job_key: bytes = b"",
        setting_up: Callable[[], bool] = lambda: False,
    ) -> None:
        self._who = who
        self._session = session
        self._prefix = prefix
        self._bounds = bounds
        self._backend = backend
        self._job_key = job_key
        self._setting_up = setting_up
        self._known = Recorded()
        self._state: Following | None = None
        self._asked_at = float("-inf")
        self._end_read = asyncio.Event()
        self.trouble: Callable[[], StoreTrouble | None] = lambda: None
        """Returns the problem with the rendezvous store; None while it is usable."""

    def stepped(self, before: Following, after: Following) -> None:
        """Record a step of the agent's rendezvous."""
        now_ms = time.time_ns() // 1_000_000
        self._known = recorded(self._known, before, after, self._who, now_ms)
        self._state = after

    def may_read(self, headers: Mapping[str, str]) -> bool:
        """Return True if the request's headers prove possession of the job's key."""
        return proven(self._job_key, headers, time.time_ns() // 1_000_000)

    def answer(self) -> bytes:
        """Return the body of the answer, and note that there is a reader."""
        self._asked_at = time.monotonic()
        if self._known.state is RoundState.CLOSED:
            self._end_read.set()
        return json.dumps(written(replace(self._told(), store=self.trouble()))).encode()

    async def end_read(self) -> None:
        """Wait until the job's end was read, if the job ended and there was a reader lately."""
        reading = time.monotonic() - self._asked_at < READING_SECONDS
        if self._known.state is not RoundState.CLOSED or not reading:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STAY_SECONDS):
                await self._end_read.wait()

    def _told(self) -> Served:
        state, who = self._state, self._who
        if state is None:
            return Served(self._backend, who.id, {})
        found = records(self._known, state, who, self._session, self._prefix, self._bounds)
        word = str(self._known.state) if self._known.number else ""
        if word == RoundState.JOINABLE and self._setting_up():
            word = SETUP
        return served(self._prefix, self._backend, who.id, found, word)
