"""Key-value store of a round: the caller's store, under a prefix of the round."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"


def round_prefix(run_id: str, number: int) -> str:
    """Return the prefix of a round's keys, as in torch's dynamic rendezvous."""
    return f"torch.rendezvous.{run_id}.{number}"


KEPT_ROUNDS = 2
"""Number of the last rounds whose keys are still read, see `handler.last_stores`."""
_ADDRESS_KEYS = tuple(f"/{name}".encode() for name in (MASTER_ADDR, MASTER_PORT))
_ROUND_KEY = re.compile(rb"/(torch\.rendezvous\.[^/]+)\.(\d+)/")


def of_former_rounds(keys: Sequence[bytes]) -> list[bytes]:
    """Return the keys, in a store's form, of all rounds before the last KEPT_ROUNDS of each run.

    The workers' addresses stay: torch's agents publish them in their first round only.
    """
    found = [(key, match) for key in keys if (match := _ROUND_KEY.match(key)) is not None]
    newest: dict[bytes, int] = {}
    for _, match in found:
        newest[match[1]] = max(newest.get(match[1], 0), int(match[2]))
    return [
        key
        for key, match in found
        if int(match[2]) <= newest[match[1]] - KEPT_ROUNDS and not key.endswith(_ADDRESS_KEYS)
    ]


class PrefixedStore:
    """View of a store under a prefix, for stores that are not torch's; keys are `prefix/key`."""

    def __init__(self, prefix: str, store: Any) -> None:
        self._prefix = prefix
        self._store = store

    @property
    def underlying_store(self) -> Any:
        return self._store

    @property
    def timeout(self) -> timedelta:
        timeout: timedelta = self._store.timeout
        return timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(self._key(key))
        return value

    def add(self, key: str, amount: int) -> int:
        total: int = self._store.add(self._key(key), amount)
        return total

    def check(self, keys: list[str]) -> bool:
        there: bool = self._store.check([self._key(key) for key in keys])
        return there

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        wanted = [self._key(key) for key in keys]
        if timeout is None:
            self._store.wait(wanted)
        else:
            self._store.wait(wanted, timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._store.multi_get([self._key(key) for key in keys])
        return values

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        self._store.multi_set([self._key(key) for key in keys], values)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        value: bytes = self._store.compare_set(self._key(key), expected, desired)
        return value

    def append(self, key: str, value: str | bytes) -> None:
        self._store.append(self._key(key), value)

    def delete_key(self, key: str) -> bool:
        deleted: bool = self._store.delete_key(self._key(key))
        return deleted

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"
