"""Error report of a failed worker, from its error file or the end of its standard error.

The input comes from the user's program and may be arbitrary: nothing in this module raises on it.
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
"""Maximum message length. A longer message, such as a log in an exception, keeps its start and
end: searching it must not block the agent."""
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_CONTROLS = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]|[\x00-\x08\x0e-\x1b\x7f]")
ABORTED_AT_EXIT = "terminate called without an active exception"
"""C++ message of a process that exits while one of its threads still runs, such as torch's after
an uncaught exception. A consequence of the failure, not its cause."""


@dataclass(frozen=True, slots=True)
class Account:
    """A worker's own report of its failure.

    Args:
        traceback: the full text, including the causes.
        at_ms: time of the failure, UTC by the worker's clock, or None.
        own: the part of `traceback` without the causes.
        causes: exceptions that this one was raised from, or during the handling of; nearest first.
    """

    message: str
    traceback: str = ""
    at_ms: int | None = None
    own: str = ""
    causes: tuple[Raised, ...] = ()


def from_error_file(raw: bytes) -> Account | None:
    """Parse an error file; return None if it holds nothing usable.

    Two forms are in use: `message` is an object with its own `message` and `extraInfo`, or plain
    text with a `timestamp` beside it.
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

    With `final_only` the traceback must be the last output: a worker that did not end by itself
    may have caught and logged an earlier one.
    """
    text = _RANK_PREFIX.sub("", encodable(tail))
    head, aborted, rest = text.rpartition(ABORTED_AT_EXIT)
    text = head if aborted and not rest.strip() else text
    found = last_raised(text)
    if found is None or (final_only and found.rest > MESSAGE_LINES):
        return None
    return Account(found.message, found.traceback, None, found.own, found.causes)


def last_words(tail: str) -> str:
    """Return the last non-blank line, or an empty string."""
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
    """Return the text without lone surrogates and terminal escapes, safe to encode and display."""
    return _CONTROLS.sub("", text.encode(errors="replace").decode())
