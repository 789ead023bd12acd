"""What holds the shared state of a dynamic rendezvous: one value that can be compared and set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

Token = Any
"""What a backend gives out with a state, to fence the next write; opaque."""


class RendezvousBackend(ABC):
    """A backend of the dynamic rendezvous, as in torch."""

    reconnects: bool = False
    """Whether it can work again after a RendezvousConnectionError, so that trying is worth it."""

    errors: tuple[type[Exception], ...] = (RuntimeError, ValueError, LookupError, OSError)
    """What the key-value store that belongs to it raises when it fails."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The backend's registered name."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """The encoded state and its token, or None where there is none.

        Raises:
            RendezvousConnectionError: the backend can't be reached.
            RendezvousStateError: what is stored is not an encoded state.
        """

    @abstractmethod
    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Write the state if the stored one still has this token, or with None: if there is none.

        Returns:
            What is stored then, its token, and whether our write was applied; None where
            nothing is stored (and the write was not applied).

        Raises:
            RendezvousConnectionError: the backend can't be reached.
            RendezvousStateError: what is stored is not an encoded state.
        """
