"""Dynamic rendezvous behind torch's `RendezvousHandler`."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from elasticjob_rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from elasticjob_rendezvous.dynamic.core import decisions
from elasticjob_rendezvous.dynamic.core.liveness import pause_seconds
from elasticjob_rendezvous.dynamic.core.settings import (
    KEEP_ALIVE_INTERVAL_SECONDS,
    KEEP_ALIVE_MAX_ATTEMPT,
    RendezvousSettings,
    RendezvousTimeout,
)
from elasticjob_rendezvous.dynamic.core.state import (
    OUR_LOCAL_IDS,
    NodeDesc,
    RankAssignment,
    State,
    addr_of_ours,
    assignment,
    gone,
    moved_on,
    nodes_waiting,
)
from elasticjob_rendezvous.dynamic.master_address import Masters, Sharing
from elasticjob_rendezvous.dynamic.operation import Actor, Decide, Operation
from elasticjob_rendezvous.dynamic.ports import Clock, RendezvousBackend
from elasticjob_rendezvous.dynamic.shared_state import SharedState
from elasticjob_rendezvous.dynamic.stores import MASTER_PORT, PrefixedStore, round_prefix

log = logging.getLogger(__name__)

EXIT_SECONDS = 2.0
"""Maximum wait of an ending process for heartbeats in progress."""
_threads: weakref.WeakKeyDictionary[threading.Thread, threading.Event] = weakref.WeakKeyDictionary()
PUBLISH_SECONDS = 60.0
"""Maximum wait of the other ranks for rank 0's MASTER_ADDR and MASTER_PORT."""
LEAVE_SECONDS = 5.0
USED_GAP = 20
"""Maximum number of rounds in a row for which an earlier run may have published no address."""
_process_base = OUR_LOCAL_IDS + secrets.randbits(30)
_handler_numbers = itertools.count()

Prefixed = Callable[[str, Any], Any]
T = TypeVar("T")


@atexit.register
def _end_all() -> None:
    """Stop all heartbeats: torch aborts a process if a call of its store returns while it ends."""
    running = [(thread, stop) for thread, stop in list(_threads.items()) if thread.is_alive()]
    for _, stop in running:
        stop.set()
    until = time.monotonic() + EXIT_SECONDS
    for thread, _ in running:
        thread.join(max(0.0, until - time.monotonic()))


class Heartbeats:
    """Repeated call of a method of `owner`, until `stop` or the owner's garbage collection.

    The first call comes after `pause_seconds`; each returns the pause before the next one. The
    thread holds only a weak reference: a dropped handler stops sending heartbeats.
    """

    def __init__(self, owner: Any, beat: Callable[[Any], float], pause_seconds: float) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=_run,
            args=(self._stop, weakref.ref(owner), beat, pause_seconds),
            name="rendezvous-heartbeats",
            daemon=True,
        )
        self._end = weakref.finalize(owner, self._stop.set)
        _threads[self._thread] = self._stop
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """Stop, and wait up to `seconds` for a heartbeat in progress."""
        self._end()
        if self._thread is not threading.current_thread():
            self._thread.join(min(seconds, threading.TIMEOUT_MAX))


def _run(
    stop: threading.Event,
    owner: weakref.ref[Any],
    beat: Callable[[Any], float],
    pause_seconds: float,
) -> None:
    pause = pause_seconds
    while not stop.wait(min(pause, threading.TIMEOUT_MAX)):
        alive = owner()
        if alive is None:
            return
        try:
            pause = beat(alive)
        except Exception:  # the next heartbeat may succeed
            log.exception("a heartbeat failed")
        del alive


class DynamicRendezvousHandler(RendezvousHandler):
    """Implementation of `api.RendezvousHandler`, created by `create_handler` or `from_backend`.

    Differences from torch's, besides the use of clocks: every round has its own MASTER_* (for
    rounds with torch's nodes see `master_address`); the loss of a node of the round counts as a
    waiting node; `shutdown` ends a `next_rendezvous` in progress, and closes the rendezvous only if
    this node has a rank in a round; `leave` never closes.
    """

    def __init__(
        self,
        node: NodeDesc,
        settings: RendezvousSettings,
        backend: RendezvousBackend,
        store: Any,
        prefixed: Prefixed = PrefixedStore,
        close_on_shutdown: bool = True,
        clock: Clock | None = None,
        sharing: Sharing | None = None,
        publish_seconds: float = PUBLISH_SECONDS,
    ) -> None:
        clock = clock or Clock()
        self._node = node
        self._settings = settings
        self._backend = backend
        self._close_on_shutdown = close_on_shutdown
        self._publish_seconds = publish_seconds
        self._actor = Actor(
            node=node,
            settings=settings,
            shared=SharedState(backend, node, settings, clock),
            clock=clock,
            reconnects=backend.reconnects,
            lock=threading.RLock(),
        )
        self._held: RankAssignment | None = None
        # Not a bound method: a reference cycle would keep a dropped handler's thread and store.
        self._store_of: Callable[[int], Any] = partial(_round_store, prefixed, settings, store)
        self._masters = Masters(node, self._store_of, sharing)
        self._heartbeats: Heartbeats | None = None
        self._beat_failed = False
        self._joiner: int | None = None
        self._no_joiner = threading.Event()
        self._no_joiner.set()

    @classmethod
    def from_backend(
        cls,
        run_id: str,
        store: Any,
        backend: RendezvousBackend,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        timeout: RendezvousTimeout | None = None,
        keep_alive_interval: int = KEEP_ALIVE_INTERVAL_SECONDS,
        keep_alive_max_attempt: int = KEEP_ALIVE_MAX_ATTEMPT,
        prefixed: Prefixed = PrefixedStore,
        close_on_shutdown: bool = True,
        sharing: Sharing | None = None,
    ) -> DynamicRendezvousHandler:
        """Create a handler on a backend; its rounds provide `store` under a prefix.

        Args:
            keep_alive_interval: seconds between heartbeats.
            prefixed: converts (prefix, store) to a store; use `PrefixStore` for torch's stores.
            close_on_shutdown: True if `shutdown` may close for all; False if it only leaves.
            sharing: see `master_address`; without it no store of torch's agents is used.

        Raises:
            ValueError: a setting is out of range.
        """
        settings = RendezvousSettings(
            run_id,
            min_nodes,
            max_nodes,
            timeout or RendezvousTimeout(),
            timedelta(seconds=keep_alive_interval),
            keep_alive_max_attempt,
            sharing is not None and sharing.lasting is not None,
        )
        node = new_node(local_addr)
        return cls(node, settings, backend, store, prefixed, close_on_shutdown, sharing=sharing)

    # -- the API --------------------------------------------------------------------

    @property
    def settings(self) -> RendezvousSettings:
        return self._settings

    def get_backend(self) -> str:
        return self._backend.name

    @property
    def use_agent_store(self) -> bool:
        return self._masters.shared

    def get_run_id(self) -> str:
        return self._settings.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        self._joiner = threading.get_ident()
        self._no_joiner.clear()
        try:
            self._release()
            return self._rendezvous()
        except BaseException as error:  # also from a signal: spare the others our expiry
            self._release()
            self._masters.close()
            self._held = None
            if not isinstance(error, RendezvousClosedError | RendezvousConnectionError):
                self._abandon()
            raise
        finally:
            self._joiner = None
            self._no_joiner.set()

    def is_closed(self) -> bool:
        with self._actor.lock:
            return self._actor.shared.read(cached=True).closed

    def set_closed(self) -> None:
        self._run(decisions.close, self._settings.timeout.close.total_seconds())

    def num_nodes_waiting(self) -> int:
        with self._actor.lock:
            state = self._actor.shared.read(cached=True)
            return nodes_waiting(state, self._held, self._settings)

    def lost(self) -> bool:
        """Return True if a node of our round is gone: neither a participant nor waiting."""
        with self._actor.lock:
            state, held = self._actor.shared.read(cached=True), self._held
        if held is None or state.round != held.round:
            return False
        return not held.roster.keys() <= state.participants.keys() | state.wait_list

    def moved_on(self) -> bool:
        """Return True if another node of our round has not finished and wants a newer one."""
        with self._actor.lock:
            state, held = self._actor.shared.read(cached=True), self._held
        return held is not None and moved_on(state, held, self._node)

    def gone(self) -> frozenset[int]:
        """Return the ranks of lost nodes of our round; none while torch nodes take part."""
        with self._actor.lock:
            state, held = self._actor.shared.read(cached=True), self._held
        return frozenset() if held is None else gone(state, held, self._node)

    def last_stores(self) -> list[Any]:
        """Return the stores of the last two rounds, newest first, including those without us.

        Empty if this node never saw the rendezvous open: the rounds then belong to an earlier run.
        """
        with self._actor.lock:
            number, known = self._actor.shared.state.round, self._actor.shared.was_open
        return [self._store_of(one) for one in (number, number - 1) if known and one >= 0]

    def leave(self) -> None:
        """Leave the rendezvous, which remains open for the others."""
        self._release()
        self._masters.close()
        self._held = None
        self._run(decisions.leave, self._settings.timeout.close.total_seconds())

    def shutdown(self) -> bool:
        """Close the rendezvous if we have a rank in a round (and may close it), else only leave.

        Callable from any thread and from a signal handler: a `next_rendezvous` in progress then
        raises RendezvousGracefulExitError. Irreversible.
        """
        self._actor.leaving = True
        joiner = self._joiner
        if joiner is not None:
            if joiner == threading.get_ident():
                return True
            limit_seconds = self._settings.timeout.close.total_seconds()
            return self._no_joiner.wait(min(limit_seconds, threading.TIMEOUT_MAX))
        self._release()
        try:
            if self._held is not None and self._close_on_shutdown:
                self.set_closed()
            else:
                self.leave()
        except RendezvousError as error:
            log.warning("%s: shutting down failed: %s", self._node, error)
            return False
        return True

    # -- implementation -------------------------------------------------------------

    def _rendezvous(self) -> RendezvousInfo:
        self._held = None
        self._skip_used_rounds()
        limit_seconds = self._settings.timeout.join.total_seconds()
        while True:
            join = Operation(self._actor, decisions.join, limit_seconds, rejoins=True)
            held = assignment(join.run(), self._node)
            assert held is not None, "a join finishes with a rank assignment"
            self._held = held
            self._actor.least_round = held.round + 1
            self._heartbeats = Heartbeats(
                self, DynamicRendezvousHandler._beat, self._settings.interval_seconds
            )
            info = self._bootstrap(held)
            if info is not None:
                log.info(
                    "%s: rank %d of %d in round %d of %r",
                    *(self._node, held.rank, len(held.roster), held.round, self._settings.run_id),
                )
                store = self._store_of(held.round)
                return RendezvousInfo(store, held.rank, len(held.roster), info, held.round)
            self._release()

    def _skip_used_rounds(self) -> None:
        """Find the first round without keys, at the first join.

        The state of an earlier run with this id may have expired (in etcd, after two hours), while
        the keys of its rounds exist. No address is published before its round is complete.
        """
        actor = self._actor
        if actor.least_round:
            return
        failures: tuple[type[Exception], ...] = (RendezvousConnectionError, *self._backend.errors)
        try:
            with actor.lock:
                state = actor.shared.read()
            if state.complete or state.closed:
                return
            number, used = state.round, state.round - 1
            while number - used <= (1 if used < state.round else USED_GAP):
                if self._store_of(number).check([MASTER_PORT]):
                    used = number
                number += 1
        except failures as error:
            log.debug("%s: cannot look for keys of an earlier run: %s", self._node, error)
            return
        if used >= state.round:
            actor.least_round = used + 1
            log.warning(
                "%s: an earlier run with the id %r has left keys: this one begins with round %d",
                *(self._node, self._settings.run_id, actor.least_round),
            )

    def _bootstrap(self, held: RankAssignment) -> RendezvousStoreInfo | None:
        """Publish MASTER_* or wait for them; return None if the round ended first."""
        call = self._masters.publish if held.rank == 0 else self._masters.find
        monotonic = self._actor.clock.monotonic
        began = monotonic()
        pause = 0.01
        while (waited := monotonic() - began) < self._publish_seconds:
            info = self._kv(partial(call, held, waited))
            if info is not None:
                return info
            if self._actor.leaving:
                raise RendezvousGracefulExitError(f"{self._node} was shut down")
            if self.is_closed():
                raise RendezvousClosedError(f"the rendezvous {self.get_run_id()!r} is closed")
            if self._broken(held):
                return None
            self._actor.wait(pause)
            pause = min(0.2, 2 * pause)
        raise RendezvousTimeoutError(
            f"{held.master}, rank 0 of round {held.round}, did not publish its MASTER_ADDR within "
            f"{self._publish_seconds:g} s; if it is a node of torch's own, the agent that hosted "
            "the workers' store is gone: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on every node"
        )

    def _broken(self, held: RankAssignment) -> bool:
        with self._actor.lock:
            state = self._actor.shared.read(cached=True)
        return state.round != held.round or not held.roster.keys() <= state.participants.keys()

    def _kv(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except self._backend.errors as error:
            raise RendezvousConnectionError(
                f"the store of the rendezvous {self.get_run_id()!r} failed: {error}"
            ) from error

    def _run(self, decide: Decide, limit_seconds: float) -> State:
        return Operation(self._actor, decide, limit_seconds).run()

    def _beat(self) -> float:
        """Send one heartbeat and return the pause before the next one.

        Runs in the heartbeats' thread.
        """
        self._try_beat()
        with self._actor.lock:
            shared = self._actor.shared
            listed = self._node in shared.state.last_heartbeats
            now = self._actor.clock.monotonic()
            return pause_seconds(self._settings, now, shared.beat_at, listed)

    def _try_beat(self) -> None:
        """Send one heartbeat. Logs an outage at its two ends."""
        failed_before = self._beat_failed
        self._beat_failed = True
        try:
            self._run(decisions.keep_alive, self._settings.timeout.heartbeat.total_seconds())
        except RendezvousError as error:
            level = logging.DEBUG if failed_before else logging.WARNING
            log.log(level, "%s: a heartbeat failed: %s", self._node, error)
            return
        self._beat_failed = False
        if failed_before:
            log.info("%s: heartbeats succeed again", self._node)

    def _abandon(self) -> None:
        try:
            self._run(decisions.leave, LEAVE_SECONDS)
        except RendezvousError as error:
            log.warning("%s: could not leave, this node will expire: %s", self._node, error)

    def _release(self) -> None:
        """Stop the heartbeats."""
        if self._heartbeats is not None:
            self._heartbeats.stop(self._settings.timeout.heartbeat.total_seconds())
            self._heartbeats = None


def _round_store(prefixed: Prefixed, settings: RendezvousSettings, store: Any, number: int) -> Any:
    return prefixed(round_prefix(settings.run_id, number), store)


def new_node(local_addr: str | None) -> NodeDesc:
    """Return a new unique node name, distinct from torch's handlers and other pid namespaces."""
    local_id = _process_base + next(_handler_numbers)
    addr = addr_of_ours(local_addr or socket.getfqdn(), datetime.now(UTC))
    return NodeDesc(addr, os.getpid(), local_id)
