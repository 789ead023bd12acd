"""Operation of a node on the shared state: a loop of read, decide, write and wait."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from elasticjob_rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)
from elasticjob_rendezvous.dynamic.core.decisions import (
    Action,
    Situation,
    applied,
    join,
    keep_alive,
)
from elasticjob_rendezvous.dynamic.core.settings import RendezvousSettings
from elasticjob_rendezvous.dynamic.core.state import NodeDesc, State, is_torch_node
from elasticjob_rendezvous.dynamic.ports import Clock
from elasticjob_rendezvous.dynamic.shared_state import SharedState

log = logging.getLogger(__name__)

Decide = Callable[[Situation], Action]
POLL_SECONDS = (0.1, 1.0)
CONFLICT_SECONDS = (0.01, 0.5)
RETRY_SECONDS = (0.1, 2.0)
"""First and longest wait of an exponential back-off with jitter."""
SLICE_SECONDS = 0.1
"""Maximum delay before a wait notices `leaving`."""
AHEAD_SECONDS = 0.05
"""Lead over torch's nodes in ending a last call: its ender assigns the ranks, see `nodes`."""
_BEAT_DUE = 0.9  # fraction of an interval: a slightly early timer must not skip a heartbeat


class _Turn(StrEnum):
    DONE = "done"
    WROTE = "wrote"
    CONFLICT = "conflict"
    IDLE = "idle"


@dataclass(slots=True)
class Actor:
    """Node and the state on which it acts. `lock` guards the state; `leaving` interrupts a join.

    `leaving` is a plain flag: an Event must not be set in a signal handler of its waiting thread.
    """

    node: NodeDesc
    settings: RendezvousSettings
    shared: SharedState
    clock: Clock
    reconnects: bool
    lock: threading.RLock
    leaving: bool = False
    least_round: int = 0

    def wait(self, seconds: float) -> None:
        """Sleep for `seconds`; return early if `leaving` changes."""
        ends, left = time.monotonic() + seconds, seconds
        before = self.leaving
        while left > 0 and self.leaving is before:
            time.sleep(min(left, SLICE_SECONDS))
            left = ends - time.monotonic()


class Operation:
    """Loop of `decide` until it finishes. The timeout restarts while the node stands by."""

    def __init__(
        self, actor: Actor, decide: Decide, limit_seconds: float, rejoins: bool = False
    ) -> None:
        self._actor = actor
        self._decide = decide
        self._limit_seconds = limit_seconds
        self._deadline = actor.clock.monotonic() + limit_seconds
        self._rejoins = rejoins
        self._was_redundant = False
        self._fresh = False

    def run(self) -> State:
        """Return the state on which the operation finished.

        Raises:
            RendezvousClosedError, RendezvousTimeoutError, RendezvousGracefulExitError: as decided.
            RendezvousConnectionError: the backend is unreachable, or was until the timeout.
            RendezvousStateError: the stored state is corrupt.
        """
        polls, conflicts, failures = 0, 0, 0
        while True:
            try:
                with self._actor.lock:
                    turn = self._turn()
                    state = self._actor.shared.state
            except RendezvousConnectionError as error:
                if self._decide is join and self._actor.leaving:
                    raise RendezvousGracefulExitError(
                        f"{self._actor.node} was shut down"
                    ) from error
                if not self._actor.reconnects or self._actor.clock.monotonic() > self._deadline:
                    raise
                first = failures == 0 and self._decide is not keep_alive
                level = logging.WARNING if first else logging.DEBUG
                log.log(level, "%s: trying again: %s", self._actor.node, error)
                self._actor.wait(self._pause(RETRY_SECONDS, failures))
                failures += 1
                continue
            failures = 0
            match turn:
                case _Turn.DONE:
                    return state
                case _Turn.WROTE:
                    polls = conflicts = 0
                case _Turn.CONFLICT:
                    self._actor.wait(self._pause(CONFLICT_SECONDS, conflicts))
                    conflicts += 1
                case _Turn.IDLE:
                    self._actor.wait(self._idle_seconds(polls))
                    polls += 1
                case _:
                    assert_never(turn)

    def _turn(self) -> _Turn:
        if not self._fresh:
            self._actor.shared.read()
        self._fresh = False
        situation = self._situation()
        action = self._decide(situation)
        match action:
            case Action.FINISH:
                return _Turn.DONE
            case Action.SYNC:
                return _Turn.IDLE
            case Action.ERROR_CLOSED:
                raise RendezvousClosedError(f"the rendezvous {self._run_id!r} is closed")
            case Action.ERROR_GRACEFUL_EXIT:
                raise RendezvousGracefulExitError(
                    f"{self._actor.node} is not needed in the rendezvous {self._run_id!r}, "
                    "or was shut down"
                )
            case Action.ERROR_TIMEOUT:
                raise RendezvousTimeoutError(
                    f"the {self._decide.__name__} of {self._actor.node} in the rendezvous "
                    f"{self._run_id!r} did not complete within {self._limit_seconds:g} s: "
                    f"{len(situation.state.participants)} of {self._actor.settings.min_nodes} "
                    "nodes take part"
                )
        self._fresh = self._actor.shared.write(applied(action, situation))
        self._rejoins &= not self._fresh
        log.debug("%s: %s %s", self._actor.node, action, "done" if self._fresh else "lost a race")
        if self._fresh and action is Action.ADD_TO_REDUNDANCY_LIST:
            log.info("%s: the round is full: standing by for a place", self._actor.node)
        return _Turn.WROTE if self._fresh else _Turn.CONFLICT

    def _situation(self) -> Situation:
        actor, shared = self._actor, self._actor.shared
        now = actor.clock.monotonic()
        if actor.node in shared.state.redundancy_list:
            self._was_redundant = True
            self._deadline = now + self._limit_seconds
        ends = self._last_call_ends()
        return Situation(
            node=actor.node,
            state=shared.state,
            settings=actor.settings,
            now=now,
            utc=actor.clock.utc(),
            deadline=self._deadline,
            beat_due=now - shared.beat_at >= actor.settings.interval_seconds * _BEAT_DUE,
            last_call_over=ends is not None and now >= ends,
            rejoins=self._rejoins,
            was_redundant=self._was_redundant,
            leaving=actor.leaving,
            least_round=actor.least_round,
        )

    def _idle_seconds(self, polls: int) -> float:
        """Return the delay before the next read: short at first, and ending with the last call."""
        seconds = self._pause(POLL_SECONDS, polls)
        with self._actor.lock:
            ends = self._last_call_ends()
        if ends is not None:
            seconds = min(seconds, max(0.0, ends - self._actor.clock.monotonic()) + 0.01)
        return seconds

    def _last_call_ends(self) -> float | None:
        """Return the last call's end on our clock; AHEAD_SECONDS earlier with torch nodes."""
        shared = self._actor.shared
        call = shared.memory.last_call
        if call is None:
            return None
        return call.ends - AHEAD_SECONDS * any(map(is_torch_node, shared.state.participants))

    def _pause(self, limits: tuple[float, float], tries: int) -> float:
        longest = min(limits[1], limits[0] * 2.0 ** min(tries, 10))
        return longest * (0.5 + 0.5 * self._actor.clock.chance())

    @property
    def _run_id(self) -> str:
        return self._actor.settings.run_id
