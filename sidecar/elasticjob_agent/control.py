"""How a short-lived process beside the agent asks it something, over its control socket.

A probe or a `preStop` starts a whole interpreter for one question, within the agent's own share of
CPU: nothing is imported here but what a unix socket needs. That is why the socket's place, alone of
all settings, is read here and not in `settings`, which loads grpc.
"""

from __future__ import annotations

import os
import socket

CONTROL = "ELASTICJOB_CONTROL"
REQUEST_SECONDS = 5.0


class NoAnswer(Exception):
    """Nobody there, or no word of theirs; the text says where and what to do."""


class NobodyThere(NoAnswer):
    """No agent listens: it has not begun yet, or has ended."""


def leave(reason: str) -> None:
    """Tell the agent that its node is to go; it has taken note on return.

    Raises:
        NobodyThere: so there is nothing to leave.
        NoAnswer: it is not known to have taken note.
    """
    quoted = "".join(f"%{byte:02x}" for byte in reason.encode(errors="replace"))
    code = _ask(f"POST /leave?{quoted}")
    if code != 202:
        raise NoAnswer(f"the agent refused to leave, with code {code}")


def is_ready() -> bool:
    """Whether the agent can take part in a round. Raises `NoAnswer`."""
    return _ask("GET /ready") == 200


def _ask(request: str) -> int:
    """The code of the answer."""
    path = os.environ.get(CONTROL, "")
    if not path:
        raise NoAnswer(f"{CONTROL} must be set to the agent's socket")
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(REQUEST_SECONDS)
            sock.connect(path)
            sock.sendall(f"{request} HTTP/1.1\r\n\r\n".encode())
            head = b""
            while b"\r\n" not in head and (data := sock.recv(4096)):
                head += data
        return int(head.split(b" ", 2)[1])
    except (FileNotFoundError, ConnectionRefusedError) as error:
        raise NobodyThere(f"no agent answers at {CONTROL}={path}: {error}") from error
    except (OSError, IndexError, ValueError) as error:
        raise NoAnswer(f"no agent answers at {CONTROL}={path}: {error}") from error
