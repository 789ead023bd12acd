"""Lines of containers' output: times, order, ranks, and marks between rounds.

A line has the time at which it was read from its container, in UTC with nine decimals: times
compare as texts. A line without a time has that of the line before it.
"""

from __future__ import annotations

import heapq
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from elasticjob_cli.errors import BadInput
from elasticjob_operator.enums import Launch
from elasticjob_rendezvous.protocol.text import counted, echoed, shortened

LONGEST_CAUSE = 300
LONGEST_DURATION = timedelta(days=3650)
_LINE = re.compile(r"(?P<time>\d{4}-\d\d-\d\dT[\d:.]+Z) ?(?P<text>.*)", re.DOTALL)
_RANK = re.compile(r"\[(\d{1,9})\] ")
_DURATION = re.compile(r"(\d{1,9}[hms])+")
_UNITS = {"h": "hours", "m": "minutes", "s": "seconds"}


class Line(NamedTuple):
    """Line of a container's output; `pod` is empty for a mark between rounds."""

    time: str
    pod: str
    text: str


class Round(NamedTuple):
    """Round of a job, and the time at which it became final; empty if unknown."""

    number: int
    time: str
    text: str


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Selection of log lines; None for no limit."""

    pod: str | None = None
    rank: int | None = None
    round: int | None = None
    tail: int | None = None
    since: timedelta | None = None
    timestamps: bool = False
    follow: bool = False


def duration(text: str) -> timedelta:
    """Return a duration such as 1h30m. Raises `BadInput`."""
    if not _DURATION.fullmatch(text):
        raise BadInput(f"--since must be a duration such as 30s, 10m or 1h30m: {echoed(text)}")
    parts = {_UNITS[unit]: int(n) for n, unit in re.findall(r"(\d+)([hms])", text)}
    found = timedelta(**parts)
    if found > LONGEST_DURATION:
        raise BadInput(f"--since must be at most {LONGEST_DURATION.days} days: {echoed(text)}")
    return found


def stamp(at: datetime) -> str:
    """Return a time in UTC as the lines have it."""
    return f"{at:%Y-%m-%dT%H:%M:%S.%f}000Z"


def without_time(line: str) -> str:
    """Return the text of a stored line."""
    found = _LINE.fullmatch(line)
    return found["text"] if found else line


def parsed_lines(pod: str, lines: Iterable[str], time: str = "") -> Iterator[Line]:
    """Yield the lines of a pod; `time` is that of the line before the first one."""
    for line in lines:
        found = _LINE.fullmatch(line)
        time = _padded(found["time"]) if found else time
        yield Line(time, pod, found["text"] if found else line)


def merged(pods: Iterable[Iterable[Line]]) -> Iterator[Line]:
    """Merge the lines of pods by time; lines of one pod keep their order."""
    return heapq.merge(*pods, key=lambda line: line.time)


def _padded(time: str) -> str:
    """Return a time with nine decimals."""
    seconds, _, decimals = time.removesuffix("Z").partition(".")
    return f"{seconds}.{decimals.ljust(9, '0')}Z"


def parsed_rounds(documents: Iterable[Mapping[str, Any]]) -> list[Round]:
    """Return the rounds of a status or of `rounds.json`, oldest first."""
    found = []
    for item in documents:
        number, time = item.get("round"), item.get("finalTime")
        if isinstance(number, int):
            began = _padded(time) if isinstance(time, str) else ""
            found.append(Round(number, began, _round_text(item)))
    return sorted(found, key=lambda one: one.number)


def _round_text(item: Mapping[str, Any]) -> str:
    """Format the beginning of a round: number, nodes and cause."""
    members, detail, nodes = item.get("members"), item.get("detail"), item.get("nodes")
    cause = str(item.get("cause") or "unknown")
    cause += ": " + ", ".join(map(str, members)) if isinstance(members, list) and members else ""
    cause += f" ({shortened(str(detail), LONGEST_CAUSE)})" if detail else ""
    size = counted(nodes, "node") if isinstance(nodes, int) else "? nodes"
    return f"[elasticjob] round {item.get('round')} begins: {size}; cause {cause}"


def selected(
    batches: Iterable[Iterable[Line]],
    options: LogOptions,
    now: datetime,
    rounds: Callable[[], list[Round]],
) -> Iterator[Line]:
    """Yield the chosen lines, with a mark before the first line of each round.

    Of the first batch only the last `options.tail` lines are chosen; `rounds` is read again for
    each batch.
    """
    oldest = "" if options.since is None else stamp(now - options.since)
    marks = _Marks(options)
    for at, batch in enumerate(batches):
        batch = batch if at == 0 else list(batch)  # read before the rounds, which may be new
        known = rounds()
        lines: Iterable[Line] = (
            line
            for line in batch
            if line.time >= oldest
            and _has_rank(line, options.rank)
            and (options.round is None or _round_at(known, line.time) == options.round)
        )
        if at == 0 and options.tail is not None:
            lines = deque(lines, maxlen=options.tail)
        yield from marks.between(lines, known)


def check_round(rounds: Iterable[Round], number: int | None) -> None:
    """Raise `BadInput` if there is no such round, or its lines cannot be distinguished."""
    known = {round_.number: round_.time for round_ in rounds}
    if number is None:
        return
    if number not in known:
        there = ", ".join(map(str, known)) or "none yet"
        raise BadInput(f"there is no round {number}; rounds: {there}")
    if not known[number]:
        raise BadInput(f"the time of round {number} is not known: another release wrote it")


def check_rank(launch: str | None, rank: int | None) -> None:
    """Raise `BadInput` if the lines of a rank cannot be identified."""
    if rank is not None and launch == Launch.PER_NODE:
        raise BadInput(
            "the output has no ranks: the command runs once for each pod (launch PerNode) and "
            "starts the workers itself; select a pod instead of a rank"
        )


def _has_rank(line: Line, rank: int | None) -> bool:
    found = _RANK.match(line.text)
    return rank is None or (found is not None and int(found[1]) == rank)


def _round_at(rounds: list[Round], time: str) -> int:
    """Return the round at a time; 0 before the first one."""
    began = [round_.number for round_ in rounds if round_.time and round_.time <= time]
    return began[-1] if began else 0


class _Marks:
    """Marks of the rounds between the lines of a log, each inserted once.

    Before the first line stands the latest mark, or none if earlier lines were left out.
    """

    def __init__(self, options: LogOptions) -> None:
        self._only = options.round
        self._cut = options.tail is not None or options.since is not None
        self._shown = 0
        self._begun = False

    def between(self, lines: Iterable[Line], rounds: list[Round]) -> Iterator[Line]:
        for line in lines:
            due = [
                round_
                for round_ in rounds
                if round_.number > self._shown
                and round_.time
                and round_.time <= line.time
                and self._only in (None, round_.number)
            ]
            for one in due if self._begun else due[-1:]:
                if self._begun or not self._cut:
                    yield Line(one.time, "", one.text)
                self._shown = one.number
            self._begun = True
            yield line
