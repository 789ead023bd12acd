"""JSON-lines protocol between the launcher, the agent and probers."""

from __future__ import annotations

import json
from typing import Any

MAX_MESSAGE_BYTES = 16 * 1024 * 1024


class WireError(Exception):
    """Received data is not a message of this protocol."""


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def canonical(message: dict[str, Any]) -> bytes:
    """Return the canonical form of a message for signing: sorted keys, no spaces, ASCII."""
    return json.dumps(message, separators=(",", ":"), sort_keys=True).encode("ascii")


def decode(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not a JSON line: {line[:80]!r}") from error
    if not isinstance(message, dict):
        raise WireError(f"a message must be a JSON object, got {line[:80]!r}")
    return message


class Lines:
    """Splitter of a byte stream into messages; a line longer than `limit_bytes` is an error."""

    def __init__(self, limit_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._held = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        searched = len(self._held)
        self._held += data
        end = self._held.rfind(b"\n", searched)
        if end < 0:
            if len(self._held) > self._limit_bytes:
                raise WireError(f"a line is longer than {self._limit_bytes} bytes")
            return []
        whole, self._held = bytes(self._held[:end]), self._held[end + 1 :]
        return [decode(line) for line in whole.split(b"\n") if line.strip()]
