"""`EtcdStore` as a `torch.distributed.Store`, for process groups and torch's own agents.

The one module of this library that imports torch: only who has the extra `torch` imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from elasticjob_rendezvous.etcd_v2.store import EtcdStore


class TorchEtcdStore(Store):  # type: ignore[misc]  # torch is not read by the type checker
    """Hands everything to an `EtcdStore`; see there. torch's C++ calls these methods too."""

    def __init__(self, store: EtcdStore) -> None:
        super().__init__()  # or torch's half of the object is missing
        self._store = store
        super().set_timeout(store.timeout)

    @property
    def underlying_store(self) -> EtcdStore:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._store.set_timeout(timeout)

    def clone(self) -> TorchEtcdStore:
        return TorchEtcdStore(self._store.clone())

    def has_extended_api(self) -> bool:
        """That append, multi_get and multi_set work."""
        return True

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, value)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._store.multi_set(keys, values)

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, value: int) -> int:
        return self._store.add(key, value)

    def append(self, key: str, value: str | bytes) -> None:
        self._store.append(key, value)

    def compare_set(
        self, key: str, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        return self._store.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        return self._store.num_keys()

    # The names under which torch's C++, a PrefixStore for one, looks for these two.
    deleteKey = delete_key
    getNumKeys = num_keys
