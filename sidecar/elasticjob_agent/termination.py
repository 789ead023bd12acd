"""Termination message: explains an agent's end without etcd; a kubelet keeps 4096 bytes of it."""

from __future__ import annotations

from pathlib import Path

MAX_BYTES = 4096
_CUT = "\n[…]\n"


def clipped(message: str, max_bytes: int = MAX_BYTES) -> str:
    """Cut the message in the middle: the first lines name the error, the last lines the cause."""
    raw = message.encode(errors="replace")
    if len(raw) <= max_bytes:
        return raw.decode()
    room = max_bytes - len(_CUT.encode())
    head = raw[: room // 3].decode(errors="ignore")
    tail = raw[len(raw) - (room - room // 3) :].decode(errors="ignore")
    return head + _CUT + tail


def write_termination(path: Path | None, message: str) -> OSError | None:
    """Write the message, unless `path` is None.

    Errors are returned, not raised: the agent's end continues.
    """
    if path is None:
        return None
    try:
        path.write_bytes(clipped(message).encode())
    except OSError as error:
        return error
    return None
