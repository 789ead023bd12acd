"""Shared state in a torch store, which has compare-and-set but blocks on missing keys."""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from typing import Any

from elasticjob_rendezvous.api import RendezvousConnectionError, RendezvousStateError
from elasticjob_rendezvous.dynamic.ports import RendezvousBackend, Token

NOTHING = b"Y2FuaW1hZGFt"
"""Value for "no state", since reading a missing key would block. As in torch."""
STATE_PREFIX = "torch.rendezvous."
"""Prefix of the keys of all rendezvous in a store."""
_FAILURES = (ValueError, RuntimeError, TimeoutError)


class C10dRendezvousBackend(RendezvousBackend):
    """Rendezvous backend on a `torch.distributed.Store`, byte-compatible with torch's.

    The token is the stored value itself, in base64. A broken connection of the store is not
    restored. Use a separate store for the backend: a blocking call on it delays all others.

    Args:
        store: store of the state.
        run_id: id of the rendezvous.

    Raises:
        ValueError: the run id is empty.
        RendezvousConnectionError: the store is unreachable.
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
        if token and not isinstance(token, bytes):  # not a token of this backend
            found = self.get_state()
            return (*found, False) if found else None
        expected, desired = token or NOTHING, b64encode(state)
        stored = self._compare_set(expected, desired)
        if stored == expected != desired:
            # The reply equals the expected value, yet ours was not stored: a TCPStore answers so
            # for a missing key. In all other cases the stored value shows if our write succeeded.
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
    """Return the key of a rendezvous' state, as in torch."""
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
