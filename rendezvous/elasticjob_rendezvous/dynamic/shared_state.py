"""Local copy of the shared state: read, purged of dead nodes, and written by compare-and-set."""

from __future__ import annotations

import logging

from elasticjob_rendezvous.dynamic import wire
from elasticjob_rendezvous.dynamic.core.liveness import Memory, dead, observe
from elasticjob_rendezvous.dynamic.core.settings import RendezvousSettings
from elasticjob_rendezvous.dynamic.core.state import NodeDesc, State, rank_order, without
from elasticjob_rendezvous.dynamic.ports import Clock, RendezvousBackend, Token

log = logging.getLogger(__name__)

CACHED_SECONDS = 1.0
"""Maximum age of a cached state that `read` returns to a polling caller."""


class SharedState:
    """Shared state without the nodes that this node considers dead. Not thread-safe.

    The next write of any node that detected a death removes the dead node from the stored state.
    """

    def __init__(
        self, backend: RendezvousBackend, node: NodeDesc, settings: RendezvousSettings, clock: Clock
    ) -> None:
        self._backend = backend
        self._node = node
        self._settings = settings
        self._clock = clock
        self._token: Token = None
        self._gone: frozenset[NodeDesc] = frozenset()
        self._next_round = 0
        self._last = (b"", State())
        self.state = State()
        self.memory = Memory()
        self.was_open = False
        """Set once the rendezvous has been seen open."""
        self._asked: float | None = None
        self.beat_at = float("-inf")
        """Monotonic time of our last written heartbeat."""

    def read(self, cached: bool = False) -> State:
        """Return the latest state; with `cached`, one at most CACHED_SECONDS old."""
        if not cached or self._clock.monotonic() - self.memory.at > CACHED_SECONDS:
            self._ask()
            self._take(self._backend.get_state())
        return self.state

    def write(self, state: State) -> bool:
        """Write the state if unchanged since our last read; in any case update our copy."""
        beats = state.last_heartbeats.get(self._node) != self.state.last_heartbeats.get(self._node)
        began = self._ask()
        answer = self._backend.set_state(wire.encode(state), self._token)
        self._take(answer[:2] if answer is not None else None)
        applied = answer is not None and answer[2]
        if applied and beats:
            self.beat_at = began
        return applied

    def _ask(self) -> float:
        """Return the time, and note it as that of the first request since the last answer."""
        now = self._clock.monotonic()
        if self._asked is None:
            self._asked = now
        return now

    def _take(self, found: tuple[bytes, Token] | None) -> None:
        if found is None:
            # After a loss of the store's data the round numbers continue: no key is used again.
            state, self._token = State(round=self._next_round), None
        else:
            state, self._token = self._decoded(found[0]), found[1]
            self._next_round = max(self._next_round, state.round + 1)
        self.was_open |= not state.closed
        now = self._clock.monotonic()
        asked, self._asked = self._asked, None
        self.memory = observe(self.memory, state, self._settings, now, self._clock.utc(), asked)
        gone = dead(self.memory, self._settings) - {self._node}
        for node in sorted(gone - self._gone, key=rank_order):
            log.info("%s: no heartbeat from %s; removing it", self._node, node)
        self._gone = gone
        self.state = without(state, gone, self._settings)

    def _decoded(self, data: bytes) -> State:
        if data != self._last[0]:  # most reads find the same bytes
            self._last = (data, wire.decode(data))
        return self._last[1]
