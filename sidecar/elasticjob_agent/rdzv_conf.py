"""`--rdzv-conf key=value,…`: its keys, their defaults, and their errors."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields

from elasticjob_agent.settings import SettingsError


@dataclass(frozen=True, slots=True)
class Conf:
    """The keys of `--rdzv-conf`. Durations are seconds; torch's names are kept where it has one."""

    timeout: float = 600.0
    last_call_timeout: float = 30.0
    keep_alive_seconds: float = 5.0
    confirm: float = 5.0
    settle: float = 3.0
    stop_grace: float = 10.0
    scale_up_wait: float = 0.0
    hang_timeout: float = 0.0
    leave_grace: float = 30.0
    connect_timeout: float = 30.0
    increment: int = 1
    incarnation: int = 0
    is_host: str = ""
    protocol: str = ""
    cacert: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    user: str = ""
    password: str = ""
    password_file: str = ""


_ALIASES = {
    "join_timeout": "timeout",
    "confirm_seconds": "confirm",
    "keep_alive": "keep_alive_seconds",
}


def read_conf(text: str) -> Conf:
    """Read `key=value,key=value`. An unknown key is an error that names the nearest known one."""
    kinds = {field.name: type(field.default) for field in fields(Conf)}
    values: dict[str, object] = {}
    for part in (piece.strip() for piece in text.split(",") if piece.strip()):
        typed, equals, value = part.partition("=")
        name = _ALIASES.get(typed.strip(), typed.strip())
        if not equals:
            raise SettingsError(f"--rdzv-conf must be key=value,…, got {part!r}")
        if name not in kinds:
            known = [*kinds, *_ALIASES]
            near = difflib.get_close_matches(typed, known, n=1)
            hint = (
                f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(known))}"
            )
            raise SettingsError(f"--rdzv-conf has no key {typed!r}{hint}")
        values[name] = _number(typed, value.strip(), kinds[name])
    return Conf(**values)  # type: ignore[arg-type]


def _number(name: str, text: str, kind: type) -> float | int | str:
    if kind is str:
        return text
    try:
        value = float(text) if kind is float else int(text)
    except ValueError:
        value = -1
    least = 1 if name in ("increment", "timeout", "join_timeout") else 0
    if not least <= value <= 1e7:
        what = "seconds" if kind is float else "a whole number"
        raise SettingsError(f"--rdzv-conf {name} must be {what} of at least {least}, got {text!r}")
    return value
