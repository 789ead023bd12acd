"""Client of the agent's control socket, for short-lived processes in the agent's container.

A probe or a `preStop` hook starts an interpreter for each request, at the expense of the agent's
CPU limit, so this module imports only what a unix socket needs. For the same reason it reads the
socket's path from the environment itself: `settings` loads grpc.
"""

from __future__ import annotations

import os
import socket

CONTROL = "ELASTICJOB_CONTROL"
REQUEST_SECONDS = 5.0


class NoAnswer(Exception):
    """Lack of a usable answer from the agent; the text names the socket and the cause."""


class AgentAbsent(NoAnswer):
    """Socket without an agent: it has not started yet, or has ended."""


def leave(reason: str) -> None:
    """Ask the agent to leave the job with its node; return once it has accepted the request.

    Raises:
        AgentAbsent: no agent runs, so there is nothing to leave.
        NoAnswer: the agent did not confirm the request.
    """
    quoted = "".join(f"%{byte:02x}" for byte in reason.encode(errors="replace"))
    code = _send(f"POST /leave?{quoted}")
    if code != 202:
        raise NoAnswer(f"the agent refused to leave: HTTP status {code}")


def is_ready() -> bool:
    """Return True if the agent can take part in a round. Raises `NoAnswer`."""
    return _send("GET /ready") == 200


def _send(request: str) -> int:
    """Send a request and return the HTTP status code."""
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
        raise AgentAbsent(f"no agent answers at {CONTROL}={path}: {error}") from error
    except (OSError, IndexError, ValueError) as error:
        raise NoAnswer(f"no agent answers at {CONTROL}={path}: {error}") from error
