"""torch's `EtcdStore`: a key-value store for the workers of one version, under one folder.

Keys and values are base64, as torch writes them. It stands alone; `torch_store` makes it a
`torch.distributed.Store`.
"""

from __future__ import annotations

import contextlib
import random
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import etcd

from elasticjob_rendezvous.etcd_v2.core.patience import after_conflict, after_failure

DEFAULT_TIMEOUT = timedelta(seconds=300)
_CROWD = 64
_WATCH_SECONDS = 30.0
"""A watch that is silent for so long is sent anew: its server may be gone without a word."""
T = TypeVar("T")


class EtcdStore:
    """Keys and values are str or bytes; what is read is bytes.

    Reads and plain writes survive trouble with etcd until the timeout. What depends on the
    present value (add, append, compare_set) raises python-etcd's error when an answer is
    lost, as it may have been done.
    """

    def __init__(
        self, etcd_client: Any, etcd_store_prefix: str, timeout: timedelta | None = None
    ) -> None:
        self.client = etcd_client
        self.prefix = etcd_store_prefix.rstrip("/") + "/"
        self._timeout = timeout or DEFAULT_TIMEOUT

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def clone(self) -> EtcdStore:
        """Another store over the same keys."""
        return EtcdStore(self.client, self.prefix, self._timeout)

    def set(self, key: str | bytes, value: str | bytes) -> None:
        path, encoded = self._path(key), _encoded(value)
        self._insist(lambda: self.client.set(path, encoded))

    def multi_set(self, keys: Sequence[str | bytes], values: Sequence[str | bytes]) -> None:
        """Raises ValueError unless there is one value for each key."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str | bytes) -> bytes:
        """Wait for a key and return its value. Raises LookupError after the timeout."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str | bytes]) -> list[bytes]:
        """Wait for all keys and return their values. Raises LookupError after the timeout."""
        return self._await(keys, self._timeout)

    def wait(self, keys: Sequence[str | bytes], override_timeout: timedelta | None = None) -> None:
        """Wait until all keys are there. Raises LookupError after the timeout."""
        self._await(keys, self._timeout if override_timeout is None else override_timeout)

    def check(self, keys: Sequence[str | bytes]) -> bool:
        """Whether all keys are there now."""
        if len(keys) == 1:
            return self._insist(lambda: self._node(keys[0])) is not None
        found, _ = self._insist(self._everything)
        return all(self._path(key) in found for key in keys)

    def add(self, key: str | bytes, num: int) -> int:
        """Add to a number, 0 if there is none yet, and return the sum."""
        return int(self._changed(key, lambda old: str(int(old or b"0") + num).encode()))

    def append(self, key: str | bytes, value: str | bytes) -> None:
        """Add bytes to the end of a value, empty if there is none yet."""
        more = _bytes(value)
        self._changed(key, lambda old: (old or b"") + more)

    def compare_set(
        self, key: str | bytes, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set a key if it has the expected value; an absent one is expected as empty.

        Returns the value that is there then; like torch's TCPStore, for an absent key that
        was not expected so, the expected one.
        """
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        while True:
            node = self._insist(lambda: self._node(key))
            current = b"" if node is None else b64decode(node.value)
            if node is None and expected:
                return expected
            if current != expected:
                return current
            with contextlib.suppress(
                etcd.EtcdAlreadyExist, etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound
            ):
                self._replace(key, node, desired)
                return desired

    def delete_key(self, key: str | bytes) -> bool:
        """Whether the key was there."""
        try:
            self.client.delete(self._path(key))
        except etcd.EtcdKeyNotFound:
            return False
        return True

    def num_keys(self) -> int:
        found, _ = self._insist(self._everything)
        return len(found)

    # -- how it is done -------------------------------------------------------------

    def _path(self, key: str | bytes) -> str:
        return self.prefix + _encoded(key)

    def _node(self, key: str | bytes) -> Any:
        """What is there; None if nothing is."""
        try:
            return self.client.get(self._path(key))
        except etcd.EtcdKeyNotFound:
            return None

    def _everything(self) -> tuple[dict[str, str], int]:
        """All encoded values by path, and etcd's index. A key with a slash in it is in a folder."""
        try:
            folder = self.client.read(self.prefix, recursive=True)
        except etcd.EtcdKeyNotFound as error:
            return {}, int(error.payload["index"])
        return {leaf.key: leaf.value for leaf in folder.leaves if not leaf.dir}, folder.etcd_index

    def _changed(self, key: str | bytes, change: Callable[[bytes | None], bytes]) -> bytes:
        """Compare and set until it succeeds; returns what was set."""
        conflicts = 0
        while True:
            node = self._insist(lambda: self._node(key))
            value = change(None if node is None else b64decode(node.value))
            try:
                self._replace(key, node, value)
            except (etcd.EtcdAlreadyExist, etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound):
                conflicts += 1
                time.sleep(after_conflict(conflicts, _CROWD, random.random()))
            else:
                return value

    def _replace(self, key: str | bytes, node: Any, value: bytes) -> None:
        condition = {"prevExist": False} if node is None else {"prevIndex": node.modifiedIndex}
        self.client.write(self._path(key), _encoded(value), **condition)

    def _await(self, keys: Sequence[str | bytes], timeout: timedelta) -> list[bytes]:
        deadline = time.monotonic() + timeout.total_seconds()
        paths = [self._path(key) for key in keys]
        found: dict[str, str] = {}
        while missing := [path for path in paths if path not in found]:
            try:
                if len(missing) == 1:
                    index = self._look(missing[0], found)
                else:
                    everything, index = self._everything()
                    found.update({p: everything[p] for p in missing if p in everything})
                if missing := [path for path in missing if path not in found]:
                    self._watch(missing[0], index + 1, deadline, found)
            except (etcd.EtcdWatchTimedOut, etcd.EtcdEventIndexCleared):
                pass  # look again; the deadline is looked at below
            except etcd.EtcdException:
                self._pause(1, deadline)
            if time.monotonic() >= deadline and not all(path in found for path in paths):
                absent = [key for key, path in zip(keys, paths, strict=True) if path not in found]
                raise LookupError(f"no {absent!r} in the store within {timeout}")
        return [b64decode(found[path]) for path in paths]

    def _look(self, path: str, found: dict[str, str]) -> int:
        """Read one key; returns etcd's index."""
        try:
            node = self.client.get(path)
        except etcd.EtcdKeyNotFound as error:
            return int(error.payload["index"])
        found[path] = node.value
        return int(node.etcd_index)

    def _watch(self, path: str, index: int, deadline: float, found: dict[str, str]) -> None:
        """Wait for one key."""
        if (left := deadline - time.monotonic()) > 0:
            event = self.client.watch(path, index=index, timeout=min(left, _WATCH_SECONDS))
            if event.value is not None:
                found[path] = event.value

    def _insist(self, operation: Callable[[], T]) -> T:
        """Repeat what may be repeated until etcd answers, or the timeout."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        failures = 0
        while True:
            try:
                return operation()
            except (etcd.EtcdKeyError, etcd.EtcdValueError):
                raise
            except etcd.EtcdException:
                failures += 1
                if time.monotonic() >= deadline:
                    raise
                self._pause(failures, deadline)

    @staticmethod
    def _pause(failures: int, deadline: float) -> None:
        left = max(0.0, deadline - time.monotonic())
        time.sleep(min(left, after_failure(failures, random.random())))


def _bytes(value: str | bytes) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    raise ValueError(f"keys and values must be str or bytes, not {type(value).__name__}")


def _encoded(value: str | bytes) -> str:
    return b64encode(_bytes(value)).decode()
