"""This node's copy of the shared state: read, judged, and written back by compare-and-set."""

from __future__ import annotations

import logging

from elasticjob_rendezvous.dynamic import wire
from elasticjob_rendezvous.dynamic.backend import RendezvousBackend, Token
from elasticjob_rendezvous.dynamic.clock import Clock
from elasticjob_rendezvous.dynamic.core.liveness import Memory, dead, observe
from elasticjob_rendezvous.dynamic.core.nodes import NodeDesc, rank_order
from elasticjob_rendezvous.dynamic.core.settings import RendezvousSettings
from elasticjob_rendezvous.dynamic.core.state import State, without

log = logging.getLogger(__name__)

CACHED_SECONDS = 1.0
"""For how long `read` may answer from memory when the caller only polls."""


class SharedState:
    """The state without the nodes that are dead as seen from here. Not thread-safe.

    The dead leave the stored state with the next write of anybody who noticed.
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
        self.saw_open = False
        """Whether the rendezvous was ever found open."""
        self.beat_at = float("-inf")
        """When (monotonic seconds) we last wrote a heartbeat of ours."""

    def read(self, cached: bool = False) -> State:
        """The latest state; with `cached` one of at most a second ago."""
        if not cached or self._clock.monotonic() - self.memory.at > CACHED_SECONDS:
            self._take(self._backend.get_state())
        return self.state

    def write(self, state: State) -> bool:
        """Write it if nobody wrote since our last read; afterwards we know the latest anyway."""
        beats = state.last_heartbeats.get(self._node) != self.state.last_heartbeats.get(self._node)
        began = self._clock.monotonic()
        answer = self._backend.set_state(wire.encode(state), self._token)
        self._take(answer[:2] if answer is not None else None)
        applied = answer is not None and answer[2]
        if applied and beats:
            self.beat_at = began
        return applied

    def _take(self, found: tuple[bytes, Token] | None) -> None:
        if found is None:
            # Where a store lost its data the numbers go on: no key of an old round is met again.
            state, self._token = State(round=self._next_round), None
        else:
            state, self._token = self._decoded(found[0]), found[1]
            self._next_round = max(self._next_round, state.round + 1)
        self.saw_open |= not state.closed
        now = self._clock.monotonic()
        self.memory = observe(self.memory, state, self._settings, now, self._clock.utc())
        gone = dead(self.memory, self._settings) - {self._node}
        for node in sorted(gone - self._gone, key=rank_order):
            log.info("%s: no heartbeat from %s; it is taken out", self._node, node)
        self._gone = gone
        self.state = without(state, gone, self._settings)

    def _decoded(self, data: bytes) -> State:
        if data != self._last[0]:  # most looks find what was there before
            self._last = (data, wire.decode(data))
        return self._last[1]
