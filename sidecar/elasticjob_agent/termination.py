"""The message that explains an agent's end without etcd; a kubelet keeps 4096 bytes of it."""

from __future__ import annotations

from pathlib import Path

MAX_BYTES = 4096
_CUT = "\n[…]\n"


def clipped(message: str, max_bytes: int = MAX_BYTES) -> str:
    """The message, cut in the middle: its first lines say what, a traceback's last lines why."""
    raw = message.encode(errors="replace")
    if len(raw) <= max_bytes:
        return raw.decode()
    room = max_bytes - len(_CUT.encode())
    head = raw[: room // 3].decode(errors="ignore")
    tail = raw[len(raw) - (room - room // 3) :].decode(errors="ignore")
    return head + _CUT + tail


def write_termination(path: Path | None, message: str) -> OSError | None:
    """Write the message, if there is a place for it. What goes wrong is returned, not raised:
    the end goes on."""
    if path is None:
        return None
    try:
        path.write_bytes(clipped(message).encode())
    except OSError as error:
        return error
    return None
