"""Error report of a failed worker, from its error file or the traceback on its standard error.

The parser handles chained causes, exception groups and syntax errors. The input comes from the
user's program and may be arbitrary: nothing in this module raises on it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticjob_rendezvous.protocol.text import printable

MESSAGE_LINES = 5
LINE_CHARACTERS = 1000
"""Maximum length of a message line below the frames: long messages must not displace them."""
MAX_DEPTH = 16
"""Maximum depth of chained causes and nested groups."""
HEADER = "Traceback (most recent call last):"
_LINKS = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Timeout)\b(?::|$)")
_PLACE = re.compile(r'^ +File "(?P<file>[^"]*)", line (?P<line>\d+)$')
_SYNTAX_ERRORS = ("SyntaxError", "IndentationError", "TabError")
# In a group every line has a bar, and a rule with a number precedes each exception.
_GROUP = re.compile(r"^ *\+ Exception Group ")
_BARRED = re.compile(r"^ +\| ?")
_RULE = re.compile(r"^ +\+(?:-\+)?-{16} (?:\d+|\.\.\.) -{16}$")
_INSIDE = re.compile(r"^ +[|+]")
_OF_GROUP = re.compile(r"\(\d+ sub-exceptions?\)$")


@dataclass(frozen=True, slots=True)
class Raised:
    """Uncaught exception as printed by Python.

    Args:
        message: the exception's line and the few that follow. For a group: the group's line with
            that of its first exception, then the lines of the other exceptions.
        traceback: the full text, including the causes.
        own: the part of `traceback` without the causes.
        rest: number of lines from the exception's first line to the end of the text.
        causes: exceptions that this one was raised from, or during the handling of; nearest first.
    """

    message: str
    traceback: str
    own: str
    rest: int
    causes: tuple[Raised, ...] = ()


def last_raised(text: str, deepest: int = MAX_DEPTH) -> Raised | None:
    """Return the last exception in a text; None if there is none."""
    if not deepest:
        return None
    lines = text.splitlines()
    heads = [n for n, line in enumerate(lines) if HEADER in line and not _BARRED.match(line)]
    if not heads:
        return _headless(lines)
    return _chained(lines, heads, deepest)


def _chained(lines: list[str], heads: list[int], deepest: int) -> Raised | None:
    """Return the exception below the last of these headers, with its causes."""
    head = heads[-1]
    group = _GROUP.match(lines[head]) is not None
    found = _grouped(lines, head, deepest) if group else _single(lines, head)
    link = _last_line_number(lines[:head])
    if found is None or link is None or lines[link].strip() not in _LINKS or deepest == 1:
        return found
    before, earlier = lines[:link], heads[:-1]
    cause = _chained(before, earlier, deepest - 1) if earlier else _headless(before)
    if cause is None:
        return found
    causes = (cause, *cause.causes, *found.causes)
    whole = f"{cause.traceback}\n\n{lines[link].strip()}\n\n{found.own}"
    return Raised(found.message, whole, found.own, found.rest, causes)


def _single(lines: list[str], head: int) -> Raised | None:
    """Return a single exception; the first line that is not indented ends its frames."""
    raised = next((n for n in range(head + 1, len(lines)) if lines[n][:1].strip()), None)
    if raised is None:
        return None
    first = lines[head][lines[head].find(HEADER) :]
    message = [line[:LINE_CHARACTERS] for line in lines[raised : raised + MESSAGE_LINES]]
    own = "\n".join([first, *lines[head + 1 : raised], *message]).strip()
    return Raised(_message(lines, head, raised), own, own, len(lines) - raised)


def _headless(lines: list[str]) -> Raised | None:
    """Return an exception without a header: cut off, or a script with a syntax error.

    Only lines that match the pattern of an exception count.
    """
    raised = next((n for n in reversed(range(len(lines))) if _RAISED.match(lines[n])), None)
    if raised is None:
        return None
    first = raised
    while first and lines[first - 1][:1] == " " and not _PLACE.match(lines[first]):
        first -= 1
    first = first if _PLACE.match(lines[first]) else raised
    own = "\n".join(lines[first:]).strip("\n").rstrip()
    message = _message(lines, first - 1, raised)
    return Raised(message, own if first < raised else message, own, len(lines) - raised)


def _message(lines: Sequence[str], before: int, raised: int) -> str:
    """Return an exception's message: its line and the next few, plus a syntax error's place."""
    message = _first_lines("\n".join(lines[raised:]))
    if not message.startswith(_SYNTAX_ERRORS):
        return message
    places = [at for line in lines[before + 1 : raised] if (at := _PLACE.match(line))]
    if not places:
        return message
    first, *more = message.splitlines()
    file = places[-1]["file"].rpartition("/")[2]
    return "\n".join([f"{first} ({file}, line {places[-1]['line']})", *more])


def _grouped(lines: list[str], head: int, deepest: int) -> Raised | None:
    end = next((n for n in range(head + 1, len(lines)) if not _INSIDE.match(lines[n])), len(lines))
    parts: list[list[str]] = [[]]
    for line in lines[head + 1 : end]:
        if _RULE.match(line):
            parts.append([])
        elif _BARRED.match(line):
            parts[-1].append(_BARRED.sub("", line))
    title = next((line for line in parts[0] if line[:1].strip()), "")
    if not title:
        return None
    within = [found for part in parts[1:] if (found := _group_member(part, deepest))]
    first = f"{title}: {within[0].message}" if within else title
    message = "\n".join([first, *(found.message for found in within[1:])])
    own = "\n".join(lines[head:]).strip("\n").rstrip()
    causes = tuple(cause for found in within for cause in found.causes)
    return Raised(_first_lines(message), own, own, len(lines) - end + 1, causes)


def _group_member(part: list[str], deepest: int) -> Raised | None:
    """Return one exception of a group; None for a nested group, whose exceptions follow."""
    found = last_raised("\n".join(part), deepest - 1)
    if found is None and part:  # an exception that was never raised has no traceback
        message = _first_lines("\n".join(part))
        found = Raised(message, message, message, len(part))
    return None if found is None or _OF_GROUP.search(found.message) else found


def _first_lines(text: str) -> str:
    return "\n".join(text.splitlines()[:MESSAGE_LINES]).strip()


def _last_line_number(lines: Sequence[str]) -> int | None:
    return next((n for n in reversed(range(len(lines))) if lines[n].strip()), None)


MESSAGE_CHARACTERS = 16 * 1024
"""Maximum message length. A longer message, such as a log in an exception, keeps its start and
end: searching it must not block the agent."""
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_NATIVE_WARNING = re.compile(r"^\[[IW]\d{4} \d\d:\d\d:\d\d\.\d+ \S+:\d+\] .*\n?", re.MULTILINE)
"""Information or warning of torch's native code, such as that of NCCL at exit after a traceback."""
_SEQUENCES = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")
"""Colours and cursor movements of a script's output, which a message does not need."""
_LINE_END = re.compile(r"\r\n?")
ABORTED_AT_EXIT = "terminate called without an active exception"
"""C++ message of a process that exits while one of its threads still runs, such as torch's after
an uncaught exception. A consequence of the failure, not its cause."""


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """Report of a failure by the worker itself.

    Args:
        traceback: the full text, including the causes.
        at_ms: time of the failure, UTC by the worker's clock, or None.
        own: the part of `traceback` without the causes.
        causes: exceptions that this one was raised from, or during the handling of; nearest first.
        is_nested_launch: True if torchrun's plug-in refused to run within the worker.
    """

    message: str
    traceback: str = ""
    at_ms: int | None = None
    own: str = ""
    causes: tuple[Raised, ...] = ()
    is_nested_launch: bool = False


_REASON, _NESTED_LAUNCH = "elasticjob_reason", "NestedLaunch"
"""Key in `extraInfo`, and its value; `elasticjob_torchrun.nested` writes them."""


def from_error_file(raw: bytes) -> ErrorReport | None:
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
    message, traceback = _clip(encodable(message.strip())), encodable(traceback.strip())
    found = last_raised(traceback)
    own, causes = ("", ()) if found is None else (found.own, found.causes)
    nested = extra.get(_REASON) == _NESTED_LAUNCH
    return ErrorReport(message, traceback, _milliseconds(stamp), own or traceback, causes, nested)


def from_stderr(tail: str, final_only: bool = False) -> ErrorReport | None:
    """Find the last Python traceback at the end of a worker's standard error.

    With `final_only` the traceback must be the last output: a worker that did not end by itself
    may have caught and logged an earlier one.
    """
    text = _NATIVE_WARNING.sub("", _RANK_PREFIX.sub("", encodable(tail)))
    head, aborted, rest = text.rpartition(ABORTED_AT_EXIT)
    text = head if aborted and not rest.strip() else text
    found = last_raised(text)
    if found is None or (final_only and found.rest > MESSAGE_LINES):
        return None
    return ErrorReport(found.message, found.traceback, None, found.own, found.causes)


def last_line(tail: str) -> str:
    """Return the last non-blank line, or an empty string."""
    lines = (line.strip() for line in reversed(_RANK_PREFIX.sub("", encodable(tail)).splitlines()))
    return next((line for line in lines if line), "")


def _clip(message: str) -> str:
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
    """Return the text without lone surrogates, colours and control characters, safe to display."""
    plain = _SEQUENCES.sub("", text.encode(errors="replace").decode())
    return printable(_LINE_END.sub("\n", plain))
