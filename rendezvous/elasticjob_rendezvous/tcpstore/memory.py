"""Keys, values and waiters of a TCPStore. No I/O."""

from __future__ import annotations

from collections.abc import Hashable, Iterable


class NotANumber(ValueError):
    """Increment of a value that is not a number."""


class Memory:
    """State of a server. Waiters are the server's own client identifiers."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._missing: dict[Hashable, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._values)

    @property
    def waiting(self) -> int:
        return len(self._missing)

    def keys(self) -> list[bytes]:
        return list(self._values)

    def get(self, key: bytes) -> bytes:
        """Return the value; empty for a missing key."""
        return self._values.get(key, b"")

    def set(self, key: bytes, value: bytes) -> list[Hashable]:
        """Set a value; return the waiters whose last missing key this was."""
        self._values[key] = value
        return self._came(key)

    def append(self, key: bytes, value: bytes) -> list[Hashable]:
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
        return 0 if self._values.pop(key, None) is None else 1

    def holds(self, keys: Iterable[bytes]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, who: Hashable, keys: Iterable[bytes]) -> bool:
        """Return True if all keys exist; else register `who` as a waiter for the missing ones."""
        missing = {key for key in keys if key not in self._values}
        if missing:
            self._missing[who] = missing
        return not missing

    def forget(self, who: Hashable) -> None:
        """Remove a waiter."""
        self._missing.pop(who, None)

    def _came(self, key: bytes) -> list[Hashable]:
        done = []
        for who, missing in self._missing.items():
            missing.discard(key)
            if not missing:
                done.append(who)
        for who in done:
            del self._missing[who]
        return done
