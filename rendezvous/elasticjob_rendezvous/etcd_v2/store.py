"""Key-value store and extra data of one version, compatible with torch's `EtcdStore`."""

from __future__ import annotations

import contextlib
import json
import random
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import etcd

from elasticjob_rendezvous.etcd_v2.core.delays import after_conflict, after_failure

DEFAULT_TIMEOUT = timedelta(seconds=300)
_COMPETITORS = 64
_WATCH_SECONDS = 30.0
"""Maximum silence of a watch before it is repeated: its server may have disappeared."""
T = TypeVar("T")


class EtcdStore:
    """Store whose keys and values are str or bytes; reads return bytes.

    Reads and plain writes are retried during trouble with etcd until the timeout. Operations
    that depend on the present value (add, append, compare_set) raise python-etcd's error if a
    reply is lost, since they may have been applied.
    """

    def __init__(
        self, etcd_client: Any, etcd_store_prefix: str, timeout: timedelta | None = None
    ) -> None:
        self.client = etcd_client
        self.prefix = etcd_store_prefix.rstrip("/") + "/"
        self._timeout = DEFAULT_TIMEOUT if timeout is None else timeout

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def clone(self) -> EtcdStore:
        """Return another store over the same keys."""
        return EtcdStore(self.client, self.prefix, self._timeout)

    def set(self, key: str | bytes, value: str | bytes) -> None:
        path, encoded = self._path(key), _encoded(value)
        self._retry(lambda: self.client.set(path, encoded))

    def multi_set(self, keys: Sequence[str | bytes], values: Sequence[str | bytes]) -> None:
        """Set several keys. Raises ValueError unless there is one value per key."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def get(self, key: str | bytes) -> bytes:
        """Wait for a key and return its value. Raises LookupError after the timeout."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str | bytes]) -> list[bytes]:
        """Wait for all keys and return their values. Raises LookupError after the timeout."""
        return self._await(keys, self._timeout)

    def wait(self, keys: Sequence[str | bytes], override_timeout: timedelta | None = None) -> None:
        """Wait until all keys exist. Raises LookupError after the timeout."""
        self._await(keys, self._timeout if override_timeout is None else override_timeout)

    def check(self, keys: Sequence[str | bytes]) -> bool:
        """Return True if all keys exist."""
        if len(keys) == 1:
            return self._retry(lambda: self._node(keys[0])) is not None
        found, _ = self._retry(self._everything)
        return all(self._path(key) in found for key in keys)

    def add(self, key: str | bytes, num: int) -> int:
        """Add to a number, 0 if missing, and return the sum."""
        return int(self._changed(key, lambda old: str(int(old or b"0") + num).encode()))

    def append(self, key: str | bytes, value: str | bytes) -> None:
        """Append bytes to a value, empty if missing."""
        more = _bytes(value)
        self._changed(key, lambda old: (old or b"") + more)

    def compare_set(
        self, key: str | bytes, expected_value: str | bytes, desired_value: str | bytes
    ) -> bytes:
        """Set a key if it has the expected value; for a missing key expect an empty value.

        Returns the resulting value; for a missing key and a non-empty `expected_value`, that
        value, like torch's TCPStore.
        """
        expected, desired = _bytes(expected_value), _bytes(desired_value)
        while True:
            node = self._retry(lambda: self._node(key))
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
        """Delete a key; return True if it existed."""
        try:
            self.client.delete(self._path(key))
        except etcd.EtcdKeyNotFound:
            return False
        return True

    def num_keys(self) -> int:
        found, _ = self._retry(self._everything)
        return len(found)

    # -- implementation -------------------------------------------------------------

    def _path(self, key: str | bytes) -> str:
        return self.prefix + _encoded(key)

    def _node(self, key: str | bytes) -> Any:
        """Return etcd's result for a key; None if it is missing."""
        try:
            return self.client.get(self._path(key))
        except etcd.EtcdKeyNotFound:
            return None

    def _everything(self) -> tuple[dict[str, str], int]:
        """Return all encoded values by path, and etcd's index.

        A key whose base64 form contains a slash is in a subdirectory.
        """
        try:
            folder = self.client.read(self.prefix, recursive=True)
        except etcd.EtcdKeyNotFound as error:
            return {}, int(error.payload["index"])
        return {leaf.key: leaf.value for leaf in folder.leaves if not leaf.dir}, folder.etcd_index

    def _changed(self, key: str | bytes, change: Callable[[bytes | None], bytes]) -> bytes:
        """Compare and set until it succeeds; return the new value."""
        conflicts = 0
        while True:
            node = self._retry(lambda: self._node(key))
            value = change(None if node is None else b64decode(node.value))
            try:
                self._replace(key, node, value)
            except (etcd.EtcdAlreadyExist, etcd.EtcdCompareFailed, etcd.EtcdKeyNotFound):
                conflicts += 1
                time.sleep(after_conflict(conflicts, _COMPETITORS, random.random()))
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
                    index = self._read_key(missing[0], found)
                else:
                    everything, index = self._everything()
                    found.update({p: everything[p] for p in missing if p in everything})
                if missing := [path for path in missing if path not in found]:
                    self._watch(missing[0], index + 1, deadline, found)
            except (etcd.EtcdWatchTimedOut, etcd.EtcdEventIndexCleared):
                pass  # read again; the deadline is checked below
            except etcd.EtcdException:
                self._pause(1, deadline)
            if time.monotonic() >= deadline and not all(path in found for path in paths):
                absent = [key for key, path in zip(keys, paths, strict=True) if path not in found]
                raise LookupError(f"no {absent!r} in the store within {timeout}")
        return [b64decode(found[path]) for path in paths]

    def _read_key(self, path: str, found: dict[str, str]) -> int:
        """Read one key; return etcd's index."""
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

    def _retry(self, operation: Callable[[], T]) -> T:
        """Repeat an idempotent operation until etcd answers or the timeout expires."""
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


def store(client: Any, path: str, key: str, value: Any) -> None:
    """Set one field; concurrent writes by other members are preserved."""
    conflicts = 0
    while True:
        try:
            found = client.get(path)
        except etcd.EtcdKeyNotFound:
            found = None
        fields = json.loads(found.value) if found else {}
        condition = {"prevValue": found.value} if found else {"prevExist": False}
        try:
            client.write(path, json.dumps({**fields, key: value}), **condition)
        except (etcd.EtcdAlreadyExist, etcd.EtcdCompareFailed):
            conflicts += 1
            time.sleep(after_conflict(conflicts, _COMPETITORS, random.random()))
        else:
            return


def load(client: Any, path: str, key: str, timeout_seconds: float | None) -> Any:
    """Wait for a field and return it. Raises LookupError after the timeout."""
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    while True:
        try:
            found = client.get(path)
            index = found.etcd_index
            fields = json.loads(found.value)
            if key in fields:
                return fields[key]
        except etcd.EtcdKeyNotFound as error:
            index = int(error.payload["index"])
        left = _WATCH_SECONDS if deadline is None else deadline - time.monotonic()
        if left <= 0:
            raise LookupError(f"no extra data {key!r} within {timeout_seconds:g} s at {path}")
        with contextlib.suppress(etcd.EtcdEventIndexCleared, etcd.EtcdWatchTimedOut):
            client.watch(path, index=index + 1, timeout=min(left, _WATCH_SECONDS))
