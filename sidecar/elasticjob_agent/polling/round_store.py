"""Shared key-value store of a round: collective operations, and the exit barrier's client.

A store is torch's `Store` or has the same methods: set, get, add, check, wait, multi_get,
multi_set, `timeout` and `set_timeout`. The keys are those of torch's agents.

The exit barrier survives an etcd outage. A finished node announces its success in the store.
Otherwise the other nodes would consider it lost once its key expires, and start a new round
without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, overload

from elasticjob_agent.polling.poll import FIRST_DONE, done_note, kept_by_etcd
from elasticjob_agent.threads import CALL_SECONDS, in_thread

log = logging.getLogger("elasticjob.agent")

TERMINAL_STATE_SYNC_ID = "torchelastic/agent/terminal_state"
IGNORED = "<val_ignored>"
TRACE = "/TRACE"
TRACING_GATE = "/TRACING_GATE"
MOST_MISSING = 16
"""Maximum number of missing ranks in an error message."""
TIMED_OUT = (RuntimeError, LookupError, TimeoutError)
"""Timeout errors of the stores: torch's, an etcd store's and ElasticJob's."""
MAX_OUTAGE_SECONDS = 300.0
"""Maximum etcd outage that a finished node waits out."""
RETRY_SECONDS = 0.5
T = TypeVar("T")


@contextmanager
def store_timeout(store: Any, timeout: float) -> Iterator[None]:
    """Set the store's timeout, in seconds, inside the context."""
    former = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(former)


def last_member(key_prefix: str) -> str:
    """Return the key that exists once all members have arrived at a barrier."""
    return f"{key_prefix}/last_member"


def arrive(store: Any, world_size: int, key_prefix: str) -> str:
    """Count this member at a barrier; return the key that exists once all have arrived."""
    last = last_member(key_prefix)
    if store.add(f"{key_prefix}/num_members", 1) == world_size:
        store.set(last, IGNORED)
    return last


@overload
def barrier(
    store: Any,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None: ...


@overload
def barrier(
    store: Any, rank: int, world_size: int, /, key_prefix: str, barrier_timeout: float = 300
) -> None: ...


def barrier(store: Any, *args: Any, **kwargs: Any) -> None:
    """Wait for all members. A prefix can be used once.

    Accepts both signatures of torch: the current one, and the old one with `rank` before
    `world_size`.

    Args:
        store: store of the round.
        world_size: number of members.
        key_prefix: prefix of the barrier's keys.
        barrier_timeout: timeout in seconds.
        rank: rank of this member; if given, the error names the missing ranks.
        rank_tracing_decoder: converts a rank to its description in the error.
        trace_timeout: maximum seconds for rank 0 to find the missing ranks.

    Raises:
        Exception: the store's timeout error, after `barrier_timeout` seconds.
        ValueError: `rank_tracing_decoder` is given without `rank`.
    """
    if len(args) > 1 and isinstance(args[1], int):  # torch's old signature, without a trace
        _barrier(store, *args[1:], **kwargs)
    else:
        _barrier(store, *args, **kwargs)


def _barrier(
    store: Any,
    world_size: int,
    key_prefix: str,
    barrier_timeout: float = 300,
    rank: int | None = None,
    rank_tracing_decoder: Callable[[int], str] | None = None,
    trace_timeout: float = 10,
) -> None:
    if rank is None and rank_tracing_decoder is not None:
        raise ValueError("rank_tracing_decoder needs rank: a trace names its rank")
    with store_timeout(store, barrier_timeout):
        last = arrive(store, world_size, key_prefix)
        try:
            store.wait([last])
        except TIMED_OUT as error:
            if rank is None:
                raise
            named = rank_tracing_decoder or str
            missing = _missing(store, world_size, key_prefix, rank, named, trace_timeout)
            if missing is None:
                raise
            raise type(error)(
                f"the barrier {key_prefix!r} of {world_size} took more than {barrier_timeout:g} s "
                f"on rank {rank}: missing_ranks=[{', '.join(missing)}]"
            ) from error


def _missing(
    store: Any,
    world_size: int,
    key_prefix: str,
    rank: int,
    named: Callable[[int], str],
    seconds: float,
) -> list[str] | None:
    """Return the ranks that did not reach a barrier, found by rank 0; None if unknown."""
    store.set(f"{key_prefix}{rank}{TRACE}", IGNORED)
    if rank != 0:
        try:
            store.wait([f"{key_prefix}{TRACING_GATE}"])
        except TIMED_OUT:
            return None
        return [f"[<check rank 0 ({named(0)}) for missing rank info>]"]
    missing: list[str] = []
    for other in range(1, world_size):
        # Once the first missing rank is found, present ranks have long left their traces, so the
        # remaining waits are short.
        limit = timedelta(milliseconds=1) if missing else timedelta(seconds=seconds)
        try:
            store.wait([f"{key_prefix}{other}{TRACE}"], limit)
        except TIMED_OUT:
            missing.append(named(other))
        if len(missing) == MOST_MISSING:
            break
    store.set(f"{key_prefix}{TRACING_GATE}", IGNORED)
    return missing


def get_all(store: Any, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """Return the values that all members set at `<prefix><rank>`, in rank order.

    Rank 0 waits until all have read, since its process may host the store.
    """
    values: list[bytes] = store.multi_get([f"{prefix}{index}" for index in range(world_size)])
    last = arrive(store, world_size, f"{prefix}/finished")
    if rank == 0:
        store.wait([last])
    return values


def synchronize(
    store: Any, data: bytes, rank: int, world_size: int, key_prefix: str, timeout: float = 300
) -> list[bytes]:
    """Publish this member's data and return that of all members in rank order."""
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        return get_all(store, rank, key_prefix, world_size)


class ExitBarrierClient:
    """Exit barrier of one round.

    Args:
        handler: rendezvous handler.
        store: store of the round.
        ours: for each node's group rank, True if it is this node.
        interval_seconds: polling interval.
        away_seconds: maximum etcd outage.
        meeting: returns False once this node no longer waits in the barrier.
        retry_seconds: pause between two attempts to reach the store.
    """

    def __init__(
        self,
        handler: Any,
        store: Any,
        ours: Sequence[bool],
        interval_seconds: float,
        away_seconds: float,
        meeting: Callable[[], bool],
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        self._handler = handler
        self._store = store
        self._ours = ours
        self._interval_seconds = interval_seconds
        self._away_seconds = away_seconds
        self._meeting = meeting
        self._retry_seconds = retry_seconds

    async def arrived(self) -> str:
        """Enter the barrier; return the key that exists once all nodes have arrived.

        Once this node has arrived, the others do not count its end as a loss: `handler.stay` makes
        its key permanent. Raises the store's errors.
        """
        last = await self._counted()
        stay = getattr(self._handler, "stay", None)
        if stay is not None:
            with contextlib.suppress(TimeoutError):
                await in_thread(stay, CALL_SECONDS)
        return last

    async def _counted(self) -> str:
        """Count this node in the barrier.

        It first writes its done notes, so that nodes that miss it afterwards know that it was done.
        A count whose answer was lost may have taken effect, so it is not repeated; all nodes have
        arrived once each has written its note.
        """
        store, last = self._store, last_member(TERMINAL_STATE_SYNC_ID)

        def count() -> str:
            return arrive(store, len(self._ours), TERMINAL_STATE_SYNC_ID)

        if not hasattr(self._handler, "gone"):
            await self._retried(lambda: store.check([last]))
            return await in_thread(count, CALL_SECONDS)
        own = [done_note(rank) for rank, is_ours in enumerate(self._ours) if is_ours]
        own.append(FIRST_DONE)
        await self._retried(lambda: [store.set(note, b"1") for note in own])
        try:
            return await in_thread(count, CALL_SECONDS)
        except Exception as error:
            if not kept_by_etcd(self._handler):
                raise
            log.warning("done, but the exit barrier may not have counted this node: %r", error)
        await self._all_noted()
        await self._retried(lambda: store.set(last, b"1"))
        return last

    def unknown(self, error: Exception) -> str:
        """Return a message about the other nodes if the barrier cannot be reached.

        Empty for a store hosted by a node: its disappearance means that the others are done.
        """
        return unknown_outcome(error, self._away_seconds) if kept_by_etcd(self._handler) else ""

    async def _all_noted(self) -> None:
        notes = [done_note(rank) for rank in range(len(self._ours))]
        while True:
            if await self._retried(lambda: self._store.check(notes)):
                return
            await asyncio.sleep(self._interval_seconds)

    async def _retried(self, call: Callable[[], T]) -> T:
        """Run an idempotent call, and retry it during an etcd outage up to the limit."""
        began, logged = time.monotonic(), False
        while True:
            try:
                return await in_thread(call, CALL_SECONDS)
            except Exception as error:
                waits = self._meeting() and kept_by_etcd(self._handler)
                if not waits or time.monotonic() - began >= self._away_seconds:
                    raise
                if not logged:
                    log.warning(
                        "done, but cannot notify the other nodes yet; retrying for up to %g s: %r",
                        self._away_seconds,
                        error,
                    )
                logged = True
            await asyncio.sleep(self._retry_seconds)


def unknown_outcome(error: Exception, seconds: float) -> str:
    """Return the message of an agent that is done and ends because etcd does not answer."""
    return (
        "all workers here did, but whether the other nodes are done is not known: "
        f"etcd did not answer for {seconds:.0f} s ({error})"
    )
