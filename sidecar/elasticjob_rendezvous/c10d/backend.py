"""The shared state in a store of torch's, which has compare-and-set but no absent keys."""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from typing import Any

from elasticjob_rendezvous.api import RendezvousConnectionError, RendezvousStateError
from elasticjob_rendezvous.dynamic.backend import RendezvousBackend, Token

NOTHING = b"Y2FuaW1hZGFt"
"""The value that stands for no state: to get an absent key would block. As in torch."""
STATE_PREFIX = "torch.rendezvous."
"""Begins the keys of all rendezvous in a store."""
_FAILURES = (ValueError, RuntimeError, TimeoutError)


class C10dRendezvousBackend(RendezvousBackend):
    """A rendezvous backend on a `torch.distributed.Store`, byte-compatible with torch's.

    The token is the stored value itself, base64. A store's connection is not mended when it
    breaks. Give the backend a store of its own: a blocking call on one holds up all others.

    Args:
        store: holds the state.
        run_id: which rendezvous.

    Raises:
        ValueError: the run id is empty.
        RendezvousConnectionError: the store can't be reached.
    """

    errors: tuple[type[Exception], ...] = _FAILURES

    def __init__(self, store: Any, run_id: str) -> None:
        if not run_id:
            raise ValueError("the run id must not be empty")
        self._store = store
        self._key = state_key(run_id)
        self._compare_set(b"", NOTHING)

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        return _decoded(self._call("get", self._key))

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        if token and not isinstance(token, bytes):  # none of ours
            found = self.get_state()
            return (*found, False) if found else None
        expected, desired = token or NOTHING, b64encode(state)
        stored = self._compare_set(expected, desired)
        if stored == expected != desired:
            # Nothing else is stored, and yet our value was not taken: a TCPStore says so of a
            # key that is gone. Unless that is so, a write is told by its value being there.
            stored = self._compare_set(b"", NOTHING)
        found = _decoded(stored)
        return (*found, found[0] == state) if found else None

    def _compare_set(self, expected: bytes, desired: bytes) -> bytes:
        value: bytes = self._call("compare_set", self._key, expected.decode(), desired.decode())
        return value

    def _call(self, operation: str, *arguments: Any) -> Any:
        try:
            return getattr(self._store, operation)(*arguments)
        except _FAILURES as error:
            raise RendezvousConnectionError(
                f"the c10d store failed to {operation} {self._key!r}: {error}"
            ) from error


def state_key(run_id: str) -> str:
    """The key of a rendezvous' state, as torch has it."""
    return f"{STATE_PREFIX}{run_id}"


def _decoded(value: bytes) -> tuple[bytes, Token] | None:
    if value == NOTHING:
        return None
    try:
        return b64decode(value, validate=True), value
    except binascii.Error as error:
        raise RendezvousStateError(
            f"the rendezvous state is corrupt: it is not base64 ({error})"
        ) from error
