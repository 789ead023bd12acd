"""What agents do together through a round's key-value store, key by key as torch's agents do.

A store is torch's `Store` or looks like it: set, get, add, check, wait, multi_get, multi_set,
`timeout` and `set_timeout`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

TERMINAL_STATE_SYNC_ID = "torchelastic/agent/terminal_state"


@contextmanager
def store_timeout(store: Any, timeout: float) -> Iterator[None]:
    """Give the store so many seconds meanwhile."""
    former = store.timeout
    store.set_timeout(timedelta(seconds=timeout))
    try:
        yield
    finally:
        store.set_timeout(former)


def last_member(key_prefix: str) -> str:
    """The key that stands once all have arrived at a barrier."""
    return f"{key_prefix}/last_member"


def arrive(store: Any, world_size: int, key_prefix: str) -> str:
    """Count us in at a barrier; the key that stands once all have arrived."""
    last = last_member(key_prefix)
    if store.add(f"{key_prefix}/num_members", 1) == world_size:
        store.set(last, "<val_ignored>")
    return last


def barrier(store: Any, world_size: int, key_prefix: str, barrier_timeout: float = 300) -> None:
    """Wait for all members; a prefix serves once. Raises the store's error when it takes longer."""
    with store_timeout(store, barrier_timeout):
        store.wait([arrive(store, world_size, key_prefix)])


def get_all(store: Any, rank: int, prefix: str, world_size: int) -> list[bytes]:
    """The values that every member set at `<prefix><rank>`.

    Rank 0 stays until all have read, since the store may live in its process.
    """
    values: list[bytes] = store.multi_get([f"{prefix}{index}" for index in range(world_size)])
    last = arrive(store, world_size, f"{prefix}/finished")
    if rank == 0:
        store.wait([last])
    return values


def synchronize(
    store: Any, data: bytes, rank: int, world_size: int, key_prefix: str, timeout: float = 300
) -> list[bytes]:
    """Give our data, and get everybody's in rank order."""
    with store_timeout(store, timeout):
        store.set(f"{key_prefix}{rank}", data)
        return get_all(store, rank, key_prefix, world_size)
