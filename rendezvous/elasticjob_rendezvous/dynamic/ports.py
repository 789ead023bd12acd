"""Ports of a dynamic rendezvous: one shared value with compare-and-set, time and randomness."""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Token = Any
"""Opaque version of a state, which fences the next write."""


class RendezvousBackend(ABC):
    """Backend of the dynamic rendezvous, as in torch."""

    reconnects: bool = False
    """True if the backend can recover from a RendezvousConnectionError, so that retries help."""

    errors: tuple[type[Exception], ...] = (RuntimeError, ValueError, LookupError, OSError)
    """Exceptions by which the backend's key-value store reports a failure."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Registered name of the backend."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the encoded state and its token, or None if there is no state.

        Raises:
            RendezvousConnectionError: the backend is unreachable.
            RendezvousStateError: the stored value is not an encoded state.
        """

    @abstractmethod
    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Write the state if the stored one still has this token; with None, if there is none.

        Returns:
            The resulting state, its token, and True if our write was applied; None if no state
            is stored (the write was then not applied).

        Raises:
            RendezvousConnectionError: the backend is unreachable.
            RendezvousStateError: the stored value is not an encoded state.
        """


def _utc() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, slots=True)
class Clock:
    """Time and randomness: `monotonic` in seconds, `utc` with time zone, `chance` from 0 to 1."""

    monotonic: Callable[[], float] = time.monotonic
    utc: Callable[[], datetime] = _utc
    chance: Callable[[], float] = random.random
