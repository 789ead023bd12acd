"""Paths of a run in etcd, and the value of `active_version`, as in torch's `etcd` backend.

No other module builds or parses a path. Compare-and-set compares raw strings, so a state keeps its
original text, and a changed state is serialized as in torch: Python's default separators, fields in
order of creation, unknown fields kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from elasticjob_rendezvous.protocol.text import echoed

DEFAULT_PREFIX = "/torchelastic/p2p"
SETUP_TTL_SECONDS = 5
JOINABLE_TTL_SECONDS = 10
"""Applies once the minimum size is reached; the member in its last call keeps the state alive."""
FROZEN_TTL_SECONDS = 10
KEEPALIVE_TTL_SECONDS = 10
RUN_TTL_SECONDS = 7200
DEFAULT_TIMEOUT_SECONDS = 600
DEFAULT_LAST_CALL_SECONDS = 30
FIRST_VERSION = "1"
_UNSAFE = re.compile(r"[?#%]")
_SPACES = re.compile(r"[^\S ]")


def is_ambiguous(path: str) -> bool:
    """Return True if etcd's v2 API would use another key for this path.

    A URL loses the part after `?` or `#`, and `%41` is an `A`; etcd resolves `.` and `..`. It also
    ignores empty segments: `exp/` and `exp` are the same.
    """
    return bool(_UNSAFE.search(path)) or not {".", ".."}.isdisjoint(path.split("/"))


@dataclass(frozen=True, slots=True)
class Paths:
    """Paths of `run_id` under `prefix`, which starts and ends with a slash.

    torch accepts a prefix without a leading slash, but then considers every member dead, since
    etcd's own key names have one.
    """

    prefix: str
    run_id: str

    @staticmethod
    def of(prefix: str, run_id: object) -> Paths:
        """Return the paths of a run, whose id may be a number.

        Raises ValueError for a name that cannot be part of a URL.
        """
        run_id = "" if run_id is None else str(run_id)
        if not run_id:
            raise ValueError("the run id must not be empty")
        for name, text, path in (
            ("run id", run_id, f"run_{run_id}"),
            ("etcd prefix", prefix, prefix),
        ):
            if is_ambiguous(path) or _SPACES.search(path):
                raise ValueError(
                    f"the {name} must not contain ?#%, white space other than spaces, nor . or .. "
                    f"between slashes, which are lost in etcd's URLs; choose another one: "
                    f"{echoed(text)}"
                )
        inner = prefix.strip("/")
        return Paths(f"/{inner}/" if inner else "/", run_id)

    def of_run(self, path: str) -> str:
        """Return a path below the run's directory; "" gives the directory itself."""
        return f"{self.prefix}run_{self.run_id}{path if path.startswith('/') else '/' + path}"

    @property
    def run(self) -> str:
        return self.of_run("")

    @property
    def rendezvous(self) -> str:
        """Directory that waiting members watch."""
        return self.of_run("/rdzv")

    @property
    def counter(self) -> str:
        return self.of_run("/rdzv/version_counter")

    @property
    def active(self) -> str:
        return self.of_run("/rdzv/active_version")

    def version(self, version: str) -> str:
        return self.of_run(f"/rdzv/v_{version}")

    def keep_alive(self, version: str, rank: int) -> str:
        return self.of_run(f"/rdzv/v_{version}/rank_{rank}")

    def extra_data(self, version: str) -> str:
        return self.of_run(f"/rdzv/v_{version}/extra_data")

    def store(self, version: str) -> str:
        return self.of_run(f"/rdzv/v_{version}/kv")


def is_keep_alive(key: str) -> bool:
    """Return True if the key is a member's keep-alive key of any version."""
    return re.search(r"/v_\d+/rank_\d+$", key) is not None


def rank_of(keep_alive: str) -> int | None:
    """Return the rank in a keep-alive key; None for other keys."""
    found = re.search(r"/rank_(\d+)$", keep_alive)
    return int(found[1]) if found else None


class Status(StrEnum):
    SETUP = "setup"
    JOINABLE = "joinable"
    FROZEN = "frozen"
    FINAL = "final"
    CLOSED = "closed"


class MalformedState(ValueError):
    """Text under `active_version` that is not a valid state."""


@dataclass(frozen=True, slots=True)
class State:
    """State of one version of the rendezvous: `text` as stored in etcd, `fields` as parsed."""

    text: str
    fields: Mapping[str, Any]

    @property
    def status(self) -> Status:
        return Status(self.fields["status"])

    @property
    def version(self) -> str | None:
        """Number of the version; None in `setup`, or if the run was closed before its first."""
        version: str | None = self.fields.get("version")
        return version

    @property
    def participants(self) -> list[int]:
        """Ranks, in the order of joining."""
        return list(self.fields.get("participants", ()))

    @property
    def keep_alives(self) -> list[str]:
        """Keys of the members, in the order of confirming."""
        return list(self.fields.get("keep_alives", ()))

    @property
    def waiting(self) -> int:
        return int(self.fields.get("num_workers_waiting", 0))

    def has(self, status: Status, version: str) -> bool:
        return self.status is status and self.version == version


def printed(fields: Mapping[str, Any]) -> State:
    """Serialize fields to a state, in this order."""
    return State(json.dumps(fields), fields)


def read(text: str | None) -> State:
    """Parse a state. Raises MalformedState if no member could have written it."""
    try:
        fields = json.loads(text or "")
    except ValueError as error:
        raise MalformedState(f"active_version must be JSON, not {text!r}") from error
    if not isinstance(fields, dict) or fields.get("status") not in list(Status):
        raise MalformedState(f"active_version must have a known status, not {text!r}")
    if fault := _fault(fields):
        raise MalformedState(f"active_version: {fault}, in {text!r}")
    return State(text or "", fields)


def _fault(fields: Mapping[str, Any]) -> str | None:
    status = fields["status"]
    if status in (Status.SETUP, Status.CLOSED):
        return None  # `closed` may replace any state, and its other fields are unused
    if not isinstance(fields.get("version"), str):
        return "version must be a string"
    if not isinstance(fields.get("participants"), list):
        return "participants must be a list"
    if status in (Status.FROZEN, Status.FINAL) and not isinstance(fields.get("keep_alives"), list):
        return "keep_alives must be a list"
    waiting = fields.get("num_workers_waiting")
    if status == Status.FINAL and not (isinstance(waiting, int) and waiting >= 0):
        return "num_workers_waiting must be a number of members"
    return None
