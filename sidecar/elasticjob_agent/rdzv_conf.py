"""Parser of `--rdzv-conf key=value,…`: each backend's keys, their defaults and their errors."""

from __future__ import annotations

from dataclasses import dataclass, fields

from elasticjob_agent.setting_values import SettingsError
from elasticjob_agent.settings import Backend, BackendOptions
from elasticjob_rendezvous.dynamic.core.settings import (
    KEEP_ALIVE_INTERVAL_SECONDS,
    KEEP_ALIVE_MAX_ATTEMPT,
)
from elasticjob_rendezvous.protocol.records.params import (
    LEAST_CONFIRM_SECONDS,
    LEAST_JOIN_SECONDS,
    LEAST_KEEP_ALIVE_SECONDS,
)
from elasticjob_rendezvous.protocol.text import echoed, hint


@dataclass(frozen=True, slots=True)
class Conf:
    """Keys of `--rdzv-conf`. Durations are in seconds; torch's names are used where it has one.

    None: the default depends on the backend.
    """

    timeout: float = 600.0
    last_call_timeout: float = 30.0
    keep_alive_seconds: float = 5.0
    confirm: float = 5.0
    settle: float = 3.0
    stop_grace: float = 10.0
    scale_up_wait: float = 0.0
    hang_timeout: float = 0.0
    leave_grace: float = 30.0
    connect_timeout: float | None = None
    close_timeout: float | None = None
    heartbeat_timeout: float | None = None
    read_timeout: int | None = None
    keep_alive_interval: int | None = None
    keep_alive_max_attempt: int | None = None
    increment: int = 1
    incarnation: int = 0
    is_host: str = ""
    store_type: str = ""
    etcd_prefix: str = ""
    protocol: str = ""
    cacert: str = ""
    cert: str = ""
    key: str = ""
    server_name: str = ""
    user: str = ""
    password: str = ""
    password_file: str = ""

    @property
    def lost_seconds(self) -> float:
        """Seconds without a heartbeat after which a node is lost.

        `keep_alive_seconds`, or torch's keep_alive_interval times keep_alive_max_attempt.
        """
        interval, attempts = self.keep_alive_interval, self.keep_alive_max_attempt
        if interval is None and attempts is None:
            return self.keep_alive_seconds
        interval = KEEP_ALIVE_INTERVAL_SECONDS if interval is None else interval
        return float(interval * (KEEP_ALIVE_MAX_ATTEMPT if attempts is None else attempts))

    @property
    def backend_options(self) -> BackendOptions:
        """Settings for the backends other than etcd v3."""
        return BackendOptions(
            connect_seconds=self.connect_timeout,
            read_seconds=self.read_timeout,
            etcd_prefix=self.etcd_prefix or None,
            beat_seconds=self.keep_alive_interval,
            beats=self.keep_alive_max_attempt,
            heartbeat_seconds=self.heartbeat_timeout,
            close_seconds=self.close_timeout,
        )


_ALIASES = {
    "join_timeout": "timeout",
    "confirm_seconds": "confirm",
    "keep_alive": "keep_alive_seconds",
    "ca_cert": "cacert",
    "ssl_cert": "cert",
    "ssl_cert_key": "key",
}
_OF_ALL = "timeout join_timeout last_call_timeout settle stop_grace hang_timeout connect_timeout"
_OF_ETCD = "protocol cacert cert key server_name user password password_file"
_OF_TORCHS_ETCD = "ca_cert ssl_cert ssl_cert_key"
ACCEPTED = {
    Backend.ETCD: frozenset(
        f"{_OF_ALL} {_OF_ETCD} {_OF_TORCHS_ETCD} keep_alive_seconds keep_alive confirm "
        "confirm_seconds scale_up_wait leave_grace increment incarnation".split()
    ),
    Backend.ETCD_V2: frozenset(
        f"{_OF_ALL} {_OF_ETCD} {_OF_TORCHS_ETCD} read_timeout etcd_prefix".split()
    ),
    Backend.C10D: frozenset(
        f"{_OF_ALL} keep_alive_seconds keep_alive keep_alive_interval keep_alive_max_attempt "
        "read_timeout close_timeout heartbeat_timeout is_host store_type".split()
    ),
}
"""Keys with an effect, by backend, including torch's aliases."""
_WHOLE_OF_TORCH = ("read_timeout", "keep_alive_interval", "keep_alive_max_attempt")
_LEAST = {
    **dict.fromkeys(("increment", "close_timeout", "heartbeat_timeout", *_WHOLE_OF_TORCH), 1),
    "timeout": LEAST_JOIN_SECONDS,
    "keep_alive_seconds": LEAST_KEEP_ALIVE_SECONDS,
    "confirm": LEAST_CONFIRM_SECONDS,
}
_REASONS = {
    "keep_alive_seconds": "etcd grants no shorter lease, and a c10d node beats once a second",
    "confirm": "members that confirm later are left out of the round",
    "heartbeat_timeout": "a heartbeat takes time",
    "close_timeout": "leaving takes time",
}
_KINDS = {"float": float, "int": int, "str": str}


def read_conf(text: str, backend: Backend = Backend.ETCD) -> Conf:
    """Read `key=value,key=value`.

    A key without effect for the backend is an error, which lists the known keys or the nearest
    one. If a key is given under two names, `join_timeout` wins, else the last one.

    Raises:
        SettingsError: a key or value is wrong.
    """
    kinds = {field.name: _KINDS[str(field.type).partition(" ")[0]] for field in fields(Conf)}
    values: dict[str, object] = {}
    parts = (piece.strip() for piece in text.split(",") if piece.strip())
    for part in sorted(parts, key=lambda part: part.startswith("join_timeout")):
        typed, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise SettingsError(f"--rdzv-conf must be key=value,…, got {echoed(part)}")
        if typed not in ACCEPTED[backend]:
            raise SettingsError(_refusal(typed, backend))
        name = _ALIASES.get(typed, typed)
        values[name] = _value(typed, name, value, kinds[name])
    conf = Conf(**values)  # type: ignore[arg-type]
    _check(conf, values)
    return conf


def _refusal(typed: str, backend: Backend) -> str:
    accepted = ACCEPTED[backend]
    others = [str(other) for other in Backend if typed in ACCEPTED[other]]
    if others:
        return (
            f"--rdzv-conf {typed} does nothing with backend {backend}, only with "
            f"{' and '.join(others)}; known are {', '.join(sorted(accepted))}"
        )
    return f"--rdzv-conf has no key {echoed(typed)} with backend {backend}; {hint(typed, accepted)}"


def _check(conf: Conf, given: dict[str, object]) -> None:
    """Check the string values, and keys that exclude each other. Raises `SettingsError`."""
    if conf.store_type.lower() not in ("", "tcp"):
        raise SettingsError(
            f"--rdzv-conf store_type must be tcp, got {echoed(conf.store_type)}: agents do not "
            "support file stores"
        )
    beats = conf.keep_alive_interval is not None or conf.keep_alive_max_attempt is not None
    if beats and "keep_alive_seconds" in given:
        raise SettingsError(
            "--rdzv-conf must give either keep_alive_seconds, or torch's keep_alive_interval and "
            "keep_alive_max_attempt: keep_alive_seconds is their product"
        )
    if beats and conf.lost_seconds < LEAST_KEEP_ALIVE_SECONDS:
        raise SettingsError(
            "--rdzv-conf keep_alive_interval times keep_alive_max_attempt must be at least "
            f"{LEAST_KEEP_ALIVE_SECONDS} seconds, or nodes are lost between two heartbeats; "
            f"got {conf.lost_seconds:g}"
        )


def _value(typed: str, name: str, text: str, kind: type) -> float | int | str:
    if kind is str:
        return text
    try:
        value = float(text) if kind is float else int(text)
    except ValueError:
        value = -1
    least = _LEAST.get(name, 0)
    if not least <= value <= 1e7:
        what = "seconds" if kind is float else "a whole number"
        note = f" ({_REASONS[name]})" if 0 <= value < least and name in _REASONS else ""
        raise SettingsError(
            f"--rdzv-conf {typed} must be {what} of at least {least}{note}, got {echoed(text)}"
        )
    return value
