"""Collective operations of agents on a round's key-value store, with the keys of torch's agents.

A store is torch's `Store` or has the same methods: set, get, add, check, wait, multi_get,
multi_set, `timeout` and `set_timeout`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, overload

TERMINAL_STATE_SYNC_ID = "torchelastic/agent/terminal_state"
IGNORED = "<val_ignored>"
TRACE = "/TRACE"
TRACING_GATE = "/TRACING_GATE"
MOST_MISSING = 16
"""Maximum number of missing ranks in an error message."""
TIMED_OUT = (RuntimeError, LookupError, TimeoutError)
"""Timeout errors of the stores: torch's, an etcd store's and ElasticJob's."""


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
