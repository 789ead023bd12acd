"""Admission of connections to a listener, of the launcher or of any other process. No I/O.

Caps on connections that have proven nothing, in all and per address, limit the memory that peers
without credentials take. At a cap the oldest of them from the address with the most is closed. If
no address has more than a few, as when all members of a large job connect to a new coordinator,
accepting pauses instead, and the kernel queues them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

Connection = TypeVar("Connection", bound=Hashable)


class Caps(NamedTuple):
    """Maximum numbers of connections.

    Args:
        unproven: unproven connections in all.
        per_address: unproven connections of one address.
        kept: kept connections in all.
        kept_per_address: kept connections of one address; None for no such cap.
        few: unproven connections of one address that are never closed in favour of others.
    """

    unproven: int
    per_address: int
    kept: int = 0
    kept_per_address: int | None = None
    few: int = 4


class Admission(Generic[Connection]):
    """Bookkeeping of one listener's connections."""

    def __init__(self, caps: Caps) -> None:
        self._caps = caps
        self._unproven: dict[Connection, str] = {}
        self._by_address: dict[str, dict[Connection, None]] = {}
        self._kept: dict[Connection, str] = {}
        self._kept_by_address: Counter[str] = Counter()

    @property
    def paused(self) -> bool:
        """True if a new connection has no place, and none is to be closed for it."""
        if len(self._unproven) < self._caps.unproven:
            return False
        return max(map(len, self._by_address.values())) <= self._caps.few

    def arrive(self, connection: Connection, address: str) -> Connection | None:
        """Add a connection; return the one to close for it, which is no longer counted."""
        own = self._by_address.setdefault(address, {})
        self._unproven[connection] = address
        own[connection] = None
        if len(own) > self._caps.per_address:
            crowd = own
        elif len(self._unproven) > self._caps.unproven:
            crowd = max(self._by_address.values(), key=len)
        else:
            return None
        oldest = next(iter(crowd))
        self.leave(oldest)
        return oldest

    def keep(self, connection: Connection) -> bool:
        """Count a connection as kept; return False if it must be closed instead."""
        address = self._unproven.get(connection)
        if address is None or len(self._kept) >= self._caps.kept:
            return False
        most = self._caps.kept_per_address
        if most is not None and self._kept_by_address[address] >= most:
            return False
        self.leave(connection)
        self._kept[connection] = address
        self._kept_by_address[address] += 1
        return True

    def leave(self, connection: Connection) -> None:
        """Remove a connection; do nothing if it is not counted."""
        address = self._unproven.pop(connection, None)
        if address is not None:
            own = self._by_address[address]
            del own[connection]
            if not own:
                del self._by_address[address]
        address = self._kept.pop(connection, None)
        if address is not None:
            self._kept_by_address[address] -= 1
            if not self._kept_by_address[address]:
                del self._kept_by_address[address]
