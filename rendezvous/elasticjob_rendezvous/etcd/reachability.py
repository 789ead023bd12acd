"""Reachability of etcd: outage as opposed to a network partition, and the local address."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

CONNECT_SECONDS = 1.0
DEFAULT_PORT = 2379


UNIX = "unix://"


def socket_path(endpoint: str) -> str | None:
    """Return the path of a unix socket's endpoint, `unix:///path`; None for any other endpoint."""
    return endpoint.removeprefix(UNIX) if endpoint.startswith(UNIX) else None


async def all_refuse(endpoints: Iterable[str]) -> bool:
    """Return True if every endpoint refuses a connection. A timeout proves nothing."""
    answers = await asyncio.gather(*(_refuses(endpoint) for endpoint in endpoints))
    return bool(answers) and all(answers)


async def _refuses(endpoint: str) -> bool:
    path = socket_path(endpoint)
    parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            if path is not None:
                _, writer = await asyncio.open_unix_connection(path)
            else:
                _, writer = await asyncio.open_connection(
                    parts.hostname or "localhost", parts.port or DEFAULT_PORT
                )
    except ConnectionRefusedError:
        return True
    except FileNotFoundError:
        return path is not None  # etcd removes its socket when it ends
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False


def address_of(host: str) -> str:
    """Return the IP address of a host name; raise OSError if it has none."""
    return str(socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0][4][0])


def address_towards(host: str, port: int) -> str:
    """Return this machine's source address towards that host; raise OSError without a route."""
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(where)  # sends nothing: only selects the route
        return str(probe.getsockname()[0])
