"""What a failed worker left behind, as text: its error file, or the end of its standard error.

Everything here comes from the user's program and may be anything at all: nothing
in this module raises on it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticjob_agent.core.tracebacks import MESSAGE_LINES, Raised, last_raised

MESSAGE_CHARACTERS = 16 * 1024
"""Of a message longer than that, a log perhaps that somebody put into an exception, the beginning
and the end are kept: what is searched for in it must not hold up the agent."""
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_CONTROLS = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|[\x00-\x08\x0e-\x1b\x7f]")
ABORTED_AT_EXIT = "terminate called without an active exception"
"""What C++ says of a process that ends while a thread of it still runs, such as torch's after an
exception that nobody caught. It is the end of the failure, not its reason."""


@dataclass(frozen=True, slots=True)
class Account:
    """What a worker says of its failure.

    Args:
        traceback: the text of all of it, with those of its causes.
        at_ms: UTC by that worker's clock, or None.
        own: of the traceback what is not its causes'.
        causes: what it was raised from, or during the handling of what; the nearest first.
    """

    message: str
    traceback: str = ""
    at_ms: int | None = None
    own: str = ""
    causes: tuple[Raised, ...] = ()


def from_error_file(raw: bytes) -> Account | None:
    """Read an error file; None when it says nothing usable.

    Two forms are in use: `message` may be an object with its own `message` and
    `extraInfo`, or plain text with a `timestamp` beside it.
    """
    try:
        document = json.loads(raw.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, Mapping):
        return None
    message: Any = document.get("message")
    extra: Any = {}
    stamp: Any = document.get("timestamp")
    if isinstance(message, Mapping):
        extra = message.get("extraInfo")
        message = message.get("message")
        extra = extra if isinstance(extra, Mapping) else {}
        stamp = extra.get("timestamp", stamp)
    if not isinstance(message, str) or not message.strip():
        return None
    callstack = extra.get("py_callstack")
    traceback = callstack if isinstance(callstack, str) else ""
    message, traceback = _clipped(encodable(message.strip())), encodable(traceback.strip())
    found = last_raised(traceback)
    own, causes = ("", ()) if found is None else (found.own, found.causes)
    return Account(message, traceback, _milliseconds(stamp), own or traceback, causes)


def from_stderr(tail: str, final_only: bool = False) -> Account | None:
    """Find the last Python traceback at the end of a worker's standard error.

    With `final_only` it must be the last thing there: of a worker that did not
    end by itself, an earlier one may have been caught and logged.
    """
    text = _RANK_PREFIX.sub("", encodable(tail))
    head, aborted, rest = text.rpartition(ABORTED_AT_EXIT)
    text = head if aborted and not rest.strip() else text
    found = last_raised(text)
    if found is None or (final_only and found.rest > MESSAGE_LINES):
        return None
    return Account(found.message, found.traceback, None, found.own, found.causes)


def last_words(tail: str) -> str:
    """The last line that says anything, or an empty string."""
    lines = (line.strip() for line in reversed(_RANK_PREFIX.sub("", encodable(tail)).splitlines()))
    return next((line for line in lines if line), "")


def _clipped(message: str) -> str:
    half = MESSAGE_CHARACTERS // 2
    short = len(message) <= MESSAGE_CHARACTERS
    return message if short else f"{message[:half]}\n[…]\n{message[-half:]}"


def _milliseconds(stamp: Any) -> int | None:
    try:
        seconds = float(stamp)
    except (TypeError, ValueError, OverflowError):
        return None
    return int(seconds * 1000) if math.isfinite(seconds) and 0 < seconds < 1e11 else None


def encodable(text: str) -> str:
    """Text that can be encoded and shown anywhere: no lone surrogates, no colours of a terminal."""
    return _CONTROLS.sub("", text.encode(errors="replace").decode())
