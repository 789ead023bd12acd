"""Parsers of single settings: variables of an environment, and texts of options.

Each raises `SettingsError`, which names the setting and the fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path

from elasticjob_rendezvous.protocol.text import echoed


class SettingsError(ValueError):
    """Missing or wrong setting; the text names the setting and the fix."""


def endpoints_of(text: str, source: str) -> tuple[str, ...]:
    """Split and validate a list of endpoints; `source` names the setting in errors."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise SettingsError(f"{source} must name at least one etcd endpoint, such as host:2379")
    for endpoint in found:
        if endpoint.startswith("unix:///"):
            continue
        host, _, port = endpoint.rpartition("://")[2].partition("/")[0].rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise SettingsError(
                f"{source} must hold host:port, http://host:port or unix:///path, "
                f"got {echoed(endpoint)}"
            )
    return found


def required(environ: Mapping[str, str], name: str) -> str:
    """Return a variable that must be set."""
    value = environ.get(name, "")
    if not value:
        raise SettingsError(f"{name} must be set")
    return value


def segment(environ: Mapping[str, str], name: str) -> str:
    """Return a variable that is one segment of a path."""
    value = required(environ, name)
    if "/" in value:
        raise SettingsError(f"{name} must not contain '/', got {echoed(value)}")
    return value


def address(environ: Mapping[str, str], name: str) -> str:
    """Return a variable that is an IP address."""
    value = required(environ, name)
    try:
        return str(ip_address(value))
    except ValueError as error:
        raise SettingsError(f"{name} must be an IP address, got {echoed(value)}") from error


def _bytes_file(environ: Mapping[str, str], name: str) -> bytes | None:
    path = environ.get(name, "")
    if not path:
        return None
    try:
        return Path(path).read_bytes().strip()
    except OSError as error:
        raise SettingsError(f"{name}: {echoed(path)} cannot be read: {error.strerror}") from error


def secret(environ: Mapping[str, str], name: str) -> bytes:
    """Return the contents of the file that a variable names, which must not be empty."""
    required(environ, name)
    content = _bytes_file(environ, name)
    if not content:
        raise SettingsError(f"{name} must be a file that is not empty")
    return content


def text_file(environ: Mapping[str, str], name: str) -> str | None:
    """Return the text of the file that a variable names; None without one."""
    content = _bytes_file(environ, name)
    return None if content is None else content.decode(errors="replace")


def whole(
    environ: Mapping[str, str], name: str, default: int, least: int = 0, most: int = 2**40
) -> int:
    """Return a whole number; `default` if the variable is absent or empty."""
    text = environ.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit()) or not least <= int(text) <= most:
        raise SettingsError(
            f"{name} must be a whole number from {least} to {most}, got {echoed(text)}"
        )
    return int(text)


def seconds(environ: Mapping[str, str], name: str, default: float, least: int = 0) -> float:
    """Return a number of seconds up to a day; `default` if the variable is absent or empty."""
    text = environ.get(name, "")
    if not text:
        return default
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not least <= found <= 86400:
        raise SettingsError(f"{name} must be seconds from {least} to 86400, got {echoed(text)}")
    return found
