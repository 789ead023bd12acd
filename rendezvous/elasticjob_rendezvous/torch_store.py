"""`EtcdStore` as a `torch.distributed.Store`, for process groups and torch's own agents.

Requires the extra `torch`; no other module of this library imports this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from elasticjob_rendezvous.etcd_v2.store import EtcdStore


class TorchEtcdStore(Store):  # type: ignore[misc]  # torch is not read by the type checker
    """Adapter that delegates every operation to an `EtcdStore`. torch's C++ calls it too.

    Keep a reference to it if a PrefixStore wraps it: torch keeps none.
    """

    def __init__(self, store: EtcdStore) -> None:
        super().__init__()  # initializes the C++ part of the object
        self._store = store
        self._clones: list[TorchEtcdStore] = []
        super().set_timeout(store.timeout)

    @property
    def client(self) -> Any:
        """Client of the store, as in torch's EtcdStore."""
        return self._store.client

    @property
    def prefix(self) -> str:
        """Key prefix of the store, as in torch's EtcdStore."""
        return self._store.prefix

    @property
    def underlying_store(self) -> EtcdStore:
        """Wrapped store, with the timeout of the C++ part: a PrefixStore sets only that one."""
        self._store.set_timeout(self.timeout)
        return self._store

    def clone(self) -> TorchEtcdStore:
        clone = TorchEtcdStore(self.underlying_store.clone())
        self._clones.append(clone)  # torch's C++ keeps no reference to it, see above
        return clone

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are supported."""
        return True

    def set(self, key: str, value: str | bytes) -> None:
        self.underlying_store.set(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self.underlying_store.multi_set(keys, values)

    def get(self, key: str) -> bytes:
        return self.underlying_store.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self.underlying_store.multi_get(keys)

    def wait(self, keys: Sequence[str], override_timeout: timedelta | None = None) -> None:
        self.underlying_store.wait(keys, override_timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self.underlying_store.check(keys)

    def add(self, key: str, num: int) -> int:
        return self.underlying_store.add(key, num)

    def append(self, key: str, value: str | bytes) -> None:
        self.underlying_store.append(key, value)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        return self.underlying_store.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        return self.underlying_store.delete_key(key)

    def num_keys(self) -> int:
        return self.underlying_store.num_keys()

    # Aliases that torch's C++ calls, for example from a PrefixStore.
    deleteKey = delete_key
    getNumKeys = num_keys
