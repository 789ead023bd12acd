"""Rendezvous endpoints: parsing, and detection of local addresses."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket

from elasticjob_rendezvous.protocol.text import echoed

DEFAULT_HOST = "localhost"
DEFAULT_C10D_PORT = 29400
_HOST = re.compile(r"[\w.:-]+")


def parse_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Split `host[:port]` at the last colon, also an IPv6 address without brackets.

    One that is complete only with the part after the last colon has no port.

    Raises:
        ValueError: the endpoint is malformed.
    """
    text = (endpoint or "").strip()
    if not text:
        return DEFAULT_HOST, default_port
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", text, re.DOTALL)
    if bracketed:
        host, port = bracketed[1], bracketed[2]
    else:
        host, colon, after = text.rpartition(":")
        host, port = (host, after) if colon else (after, None)
        if is_ipv6(text) and not is_ipv6(host):
            host, port = text, None
    if not _HOST.fullmatch(host):
        raise ValueError(
            f"the host of the rendezvous endpoint {echoed(endpoint)} must be a name or an address"
        )
    if port is None:
        return host, default_port
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(
            f"the port of the rendezvous endpoint {echoed(endpoint)} must be a number from 0 to "
            "65535"
        )
    return host, int(port)


def is_ipv6(text: str) -> bool:
    """Return True if the text is an IPv6 address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(text).version == 6
    return False


def is_this_machine(host: str) -> bool:
    """Return True if a name or an address belongs to this machine.

    Besides our host name, every name that resolves to an address of a local interface counts,
    including aliases and further networks, which torch's implementation does not recognize. A
    name that does not resolve is not local.
    """
    if host in (DEFAULT_HOST, socket.gethostname()):
        return True
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_UDP)
        return any(_is_own_address(family, address) for family, _, _, _, address in found)
    return False


def _is_own_address(family: int, address: tuple[object, ...]) -> bool:
    text = str(address[0])
    own = ipaddress.ip_address(text.partition("%")[0])
    if own.is_loopback:
        return True
    # For a local address, the kernel selects the same address as the source. Sends nothing.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address[0], 9, *address[2:]))
        except OSError:
            return False
        return bool(probe.getsockname()[0] == text)
