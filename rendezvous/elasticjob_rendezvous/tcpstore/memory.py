"""Keys, values and waiters of a TCPStore, up to a maximum size. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

ENTRY_BYTES = 256
"""Approximate size of an entry's objects, in addition to its key and value."""
REFERENCE_BYTES = 16
"""Approximate size of one key in a waiter's list; waiters share the key itself."""


class NotANumber(ValueError):
    """Increment of a value that is not a number."""


class OutOfMemory(ValueError):
    """Request that would exceed the maximum size of the store."""


Outdated = Callable[[Sequence[bytes]], Iterable[bytes]]


class Memory:
    """State of a server. Waiters are the server's own client identifiers.

    `max_bytes` limits keys, values and waiters in all. A method that would exceed it first deletes
    the keys that `outdated` selects from all keys; if that is not enough, it raises `OutOfMemory`
    and changes nothing else.
    """

    def __init__(self, max_bytes: int, outdated: Outdated = lambda keys: ()) -> None:
        self._max_bytes = max_bytes
        self._outdated = outdated
        self._bytes = 0
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[Hashable, _Waiter] = {}
        self._waiters_of: dict[bytes, dict[Hashable, None]] = {}
        """Waiters by the key that each of them waits for next."""
        self._names: dict[bytes, _Name] = {}

    def __len__(self) -> int:
        return len(self._values)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def keys(self) -> list[bytes]:
        return list(self._values)

    def get(self, key: bytes) -> bytes:
        """Return the value; empty for a missing key."""
        return self._values.get(key, b"")

    def set(self, key: bytes, value: bytes) -> list[Hashable]:
        """Set a value; return the waiters whose last missing key this was."""
        size = _size(key, value)
        self._check(size - self._held(key))
        self._bytes += size - self._held(key)  # the check may have deleted it
        self._values[key] = value
        return self._pop_ready(key)

    def append(self, key: bytes, value: bytes) -> list[Hashable]:
        self._check(len(value))  # before the copy
        return self.set(key, self.get(key) + value)

    def compare_set(
        self, key: bytes, expected: bytes, desired: bytes
    ) -> tuple[bytes, list[Hashable]]:
        """Return the resulting value and the waiters to wake.

        For a missing key the value is a non-empty `expected`, as in torch.
        """
        found = self._values.get(key)
        if found is None and expected:
            return expected, []
        if found is None or found == expected:
            return desired, self.set(key, desired)
        return found, []

    def add(self, key: bytes, amount: int) -> tuple[int, list[Hashable]]:
        try:
            total = int(self._values.get(key, b"0")) + amount
        except ValueError as error:
            raise NotANumber(f"{key!r} does not hold a number") from error
        return total, self.set(key, str(total).encode())

    def delete(self, key: bytes) -> int:
        found = self._values.pop(key, None)
        if found is None:
            return 0
        self._bytes -= _size(key, found)
        return 1

    def holds(self, keys: Iterable[bytes]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, client: Hashable, keys: Iterable[bytes]) -> bool:
        """Return True if all keys exist; else register `client` as a waiter for the others."""
        missing = {key for key in keys if key not in self._values}
        if not missing:
            return True
        self.forget(client)
        unknown = sum(_size(key, b"") for key in missing if key not in self._names)
        size = ENTRY_BYTES + REFERENCE_BYTES * len(missing)
        self._grow(size + unknown)
        shared = []
        for key in missing:
            name = self._names.setdefault(key, _Name(key))
            name.users += 1
            shared.append(name.key)
        self._waiting[client] = waiter = _Waiter(shared, size)
        self._waiters_of.setdefault(waiter.next, {})[client] = None
        return False

    def forget(self, client: Hashable) -> None:
        """Remove a waiter."""
        waiter = self._waiting.pop(client, None)
        if waiter is None:
            return
        self._bytes -= waiter.size
        self._stop_waiting(client, waiter.next)
        for key in waiter.keys:
            name = self._names[key]
            name.users -= 1
            if not name.users:
                del self._names[key]
                self._bytes -= _size(key, b"")

    def _stop_waiting(self, client: Hashable, key: bytes) -> None:
        others = self._waiters_of.get(key)
        if others is not None:
            others.pop(client, None)
            if not others:
                del self._waiters_of[key]

    def _pop_ready(self, key: bytes) -> list[Hashable]:
        """Return the waiters that wait for no further key, and drop them."""
        done = []
        for client in self._waiters_of.pop(key, {}):
            waiter = self._waiting[client]
            if waiter.advance(self._values):
                self._waiters_of.setdefault(waiter.next, {})[client] = None
            else:
                done.append(client)
        for client in done:
            self.forget(client)
        return done

    def _held(self, key: bytes) -> int:
        """Return the memory of a key and its value, 0 if it is missing."""
        found = self._values.get(key)
        return 0 if found is None else _size(key, found)

    def _grow(self, size: int) -> None:
        self._check(size)
        self._bytes += size

    def _check(self, size: int) -> None:
        if size <= 0 or self._bytes + size <= self._max_bytes:
            return
        for key in self._outdated(self.keys()):
            self.delete(key)
        if self._bytes + size > self._max_bytes:
            raise OutOfMemory(f"the store holds {self._bytes} of at most {self._max_bytes} bytes")


class _Name:
    """Key that waiters share."""

    __slots__ = ("key", "users")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.users = 0


class _Waiter:
    """Keys of one waiter, and the position of the one it waits for next.

    A key that was deleted again before the position reached it is waited for again.
    """

    __slots__ = ("keys", "position", "size")

    def __init__(self, keys: list[bytes], size: int) -> None:
        self.keys = keys
        self.position = 0
        self.size = size

    @property
    def next(self) -> bytes:
        return self.keys[min(self.position, len(self.keys) - 1)]

    def advance(self, values: dict[bytes, bytes]) -> bool:
        """Move to the next missing key; return False if there is none."""
        while self.position < len(self.keys):
            if self.keys[self.position] not in values:
                return True
            self.position += 1
        return False


def _size(key: bytes, value: bytes) -> int:
    return len(key) + len(value) + ENTRY_BYTES
