"""Value of `active_version`, in the format of torch's `etcd` backend.

Compare-and-set compares raw strings, so a state keeps its original text, and a changed state is
serialized as in torch: Python's default separators, fields in order of creation, unknown fields
kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

SETUP_TTL_SECONDS = 5
JOINABLE_TTL_SECONDS = 10
"""Applies once the minimum size is reached; the member in its last call keeps the state alive."""
FROZEN_TTL_SECONDS = 10
KEEPALIVE_TTL_SECONDS = 10
RUN_TTL_SECONDS = 7200
DEFAULT_TIMEOUT_SECONDS = 600
DEFAULT_LAST_CALL_SECONDS = 30
FIRST_VERSION = "1"


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
        """The members' own keys, in the order of confirming."""
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
