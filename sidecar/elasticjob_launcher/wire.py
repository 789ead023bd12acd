"""JSON-lines protocol of the launcher: framing, and the agent's requests, parsed once.

The agent and probers use the same framing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from elasticjob_launcher.zygote.worker_environment import shared_variables

MAX_MESSAGE_BYTES = 16 * 1024 * 1024


class WireError(Exception):
    """Received data that is not a message of this protocol."""


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


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


if TYPE_CHECKING:
    from typing import TypeAlias

    # An expression that Python 3.8 cannot evaluate.
    Request: TypeAlias = "Attach | Heartbeat | Command | Prepare | Start | Stop | Signal | Release"


class Attach(NamedTuple):
    """Identity of the agent; `orphan_seconds` None keeps the launcher's own setting.

    `deadlines`: the agent sends deadlines for the workers.
    """

    member: str
    session: str
    job_key: bytes
    orphan_seconds: float | None
    deadlines: bool = False


class Heartbeat(NamedTuple):
    """Heartbeat of the agent; the workers may live for `live_seconds` from `at`, on its clock.

    An older agent sends neither field; an agent of a rendezvous without leases sends no
    `live_seconds`.
    """

    at: float | None = None
    live_seconds: float | None = None


class Command(NamedTuple):
    """Request to run the command once for the node; torchrun in it starts the workers.

    `env` is laid over the launcher's own environment. A repeated request has no effect but the
    answer: the number of workers, once known.
    """

    env: dict[str, str]
    log_dir: str
    max_log_bytes: int


class Prepare(NamedTuple):
    """Request to preload a zygote for workers of this command and environment.

    `env` is laid over the launcher's own, as for the workers. `modules` are preloaded in addition
    to those found; `memory` is the file that stores recorded modules, or empty.
    """

    argv: tuple[str, ...]
    env: dict[str, str]
    modules: tuple[str, ...]
    memory: str

    def difference(
        self, base_env: Mapping[str, str], argv: Sequence[str], env: Mapping[str, str]
    ) -> str:
        """Return the difference between a worker and this request, or an empty string.

        `base_env` is the launcher's environment.
        """
        if list(argv) != list(self.argv):
            return "the command changed"
        was, now = shared_variables({**base_env, **self.env}), shared_variables(env)
        changed = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
        if changed:
            return f"the environment changed ({', '.join(changed[:4])})"
        return ""


class Start(NamedTuple):
    """Request to start a round's workers, with the agent's heartbeat.

    Each worker has local_rank, argv, env, log_dir, prefix, unlogged, silent.
    """

    round: int
    workers: list[dict[str, Any]]
    max_log_bytes: int
    beat: Heartbeat = Heartbeat()


class Stop(NamedTuple):
    """Request to stop a round's workers; with `dump`, they end by writing their stacks if able.

    With `copies` they first copy their training state, with `ends_step` after they have finished
    their step.
    """

    round: int
    grace_seconds: float
    dump: bool = False
    copies: bool = True
    ends_step: bool = False


class Signal(NamedTuple):
    round: int
    signum: int


class Release(NamedTuple):
    exit_code: int
    message: str


def exit_event(
    round: int,
    local_rank: int,
    pid: int,
    code: int | None,
    signum: int | None,
    message: str,
    stderr_tail: str,
    out_of_memory: bool,
    unasked: bool,
) -> dict[str, Any]:
    """Return the event of a worker that has ended now."""
    return {
        "type": "worker_exited",
        "round": round,
        "local_rank": local_rank,
        "pid": pid,
        "exit_code": code,
        "signal": signum,
        "at_unix_ms": int(time.time() * 1000),
        "message": message,
        "stderr_tail": stderr_tail,
        "out_of_memory": out_of_memory,
        "unasked": unasked,
    }


def parse_request(message: dict[str, Any]) -> Request:
    """Return the typed request; raise WireError that names the invalid field."""
    kind = message.get("type")
    if kind == "attach":
        return _attach(message)
    if kind == "beat":
        return _heartbeat(message)
    if kind == "command":
        return Command(_env(message), _text(message, "log_dir"), _int(message, "max_log_bytes"))
    if kind == "prepare":
        return _prepare(message)
    if kind == "start":
        return _start(message)
    if kind == "stop":
        return _stop(message)
    if kind == "signal":
        return Signal(_int(message, "round"), _int(message, "signum", 1, 64))
    if kind == "release":
        return Release(_int(message, "exit_code", 0, 255), _text(message, "message"))
    raise WireError(f"unknown message type {kind!r}")


def _stop(message: dict[str, Any]) -> Stop:
    # Older agents do not send the last three; with copies a round follows, so the step is ended.
    dump, copies = bool(message.get("dump", False)), bool(message.get("copies", True))
    ends_step = bool(message.get("ends_step", copies))
    seconds = _seconds(message, "grace_seconds")
    return Stop(_int(message, "round"), seconds, dump, copies, ends_step)


def _attach(message: dict[str, Any]) -> Attach:
    orphan_seconds = None
    if message.get("orphan_seconds") is not None:
        orphan_seconds = _seconds(message, "orphan_seconds")
    try:
        job_key = bytes.fromhex(_text(message, "job_key"))
    except ValueError as error:
        raise WireError("job_key must be hex digits") from error
    member, session = _text(message, "member"), _text(message, "session")
    deadlines = bool(message.get("deadlines", False))
    return Attach(member, session, job_key, orphan_seconds, deadlines)


def _heartbeat(message: dict[str, Any]) -> Heartbeat:
    at, seconds = (
        _seconds(message, name) if message.get(name) is not None else None
        for name in ("at", "live_seconds")
    )
    return Heartbeat(at, seconds)


def _start(message: dict[str, Any]) -> Start:
    workers = message.get("workers")
    if not isinstance(workers, list):
        raise WireError("workers must be a list")
    return Start(
        _int(message, "round"),
        [_worker(worker) for worker in workers],
        _int(message, "max_log_bytes"),
        _heartbeat(message),
    )


def _prepare(message: dict[str, Any]) -> Prepare:
    return Prepare(
        tuple(_texts(message, "argv")),
        _env(message),
        tuple(_texts(message, "modules")),
        _text(message, "memory"),
    )


def _worker(worker: Any) -> dict[str, Any]:
    if not isinstance(worker, dict):
        raise WireError("each of workers must be an object")
    return {
        "local_rank": _int(worker, "local_rank"),
        "argv": _texts(worker, "argv"),
        "env": _env(worker),
        "log_dir": _text(worker, "log_dir"),
        "prefix": _text(worker, "prefix"),
        # Older agents do not send these.
        **{name: _streams(worker, name) for name in ("unlogged", "silent") if name in worker},
    }


def _text(message: dict[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str):
        raise WireError(f"{name} must be a string, got {value!r}")
    return value


def _texts(message: dict[str, Any], name: str) -> list[str]:
    value = message.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise WireError(f"{name} must be a list of strings")
    return value


def _env(message: dict[str, Any]) -> dict[str, str]:
    env = message.get("env")
    if not isinstance(env, dict) or not all(isinstance(value, str) for value in env.values()):
        raise WireError("env must be an object whose values are strings")
    return env


def _streams(message: dict[str, Any], name: str) -> list[int]:
    value = message[name]
    if not isinstance(value, list) or not all(item in (1, 2) for item in value):
        raise WireError(f"{name} must be a list of 1 and 2, got {value!r}")
    return value


def _int(message: dict[str, Any], name: str, least: int = 0, most: int = 2**63) -> int:
    value = message.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise WireError(f"{name} must be a whole number from {least} to {most}, got {value!r}")
    return value


def _seconds(message: dict[str, Any], name: str) -> float:
    value = message.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1e9:
        raise WireError(f"{name} must be seconds, at least 0, got {value!r}")
    return float(value)
