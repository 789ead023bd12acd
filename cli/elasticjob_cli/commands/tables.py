"""Tables of jobs and rounds, made of their documents, and the widths of their columns.

The columns are kubectl's. A document may be damaged: a cell of another type than its column's is
shown as `<invalid>`. Nothing here needs the API's models, which take longer to load than a listing
takes.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from elasticjob_rendezvous.protocol.text import one_cell

COLUMNS = ("NAME", "PHASE", "RENDEZVOUS", "ROUND", "NODES", "WANTED", "RESTARTS", "AGE")
WIDE = ("MIN", "MAX", "MASTER", "CAUSE", "FAILURE", "LOSSES", "PREEMPTIONS", "RECOVERY MS")
NONE = "<none>"
INVALID = "<invalid>"
UNREADABLE = "<unreadable>"
Json = dict[str, Any]


def age(since: datetime | None, now: datetime) -> str:
    """Format an age as kubectl does: 45s, 3m20s, 5h12m, 3d."""
    if since is None:
        return NONE
    seconds = max(0, int((now - since).total_seconds()))
    if seconds < 120:
        return f"{seconds}s"
    if seconds < 3600:
        minutes, rest = divmod(seconds, 60)
        return f"{minutes}m{rest}s" if rest and minutes < 10 else f"{minutes}m"
    if seconds < 48 * 3600:
        hours, rest = divmod(seconds // 60, 60)
        return f"{hours}h{rest}m" if rest and hours < 8 else f"{hours}h"
    return f"{seconds // 86400}d"


class Cells:
    """Reader of the scalars of a document."""

    def __init__(self, document: Any) -> None:
        self._document = document

    def get(self, kind: type, *path: str | int) -> Any:
        """Return a value; None if it or a parent is absent, `INVALID` if one has another type."""
        found = self._document
        for step in path:
            if found is None:
                return None
            if isinstance(step, str) and isinstance(found, dict):
                found = found.get(step)
            elif isinstance(step, int) and isinstance(found, list):
                found = found[step] if found else None
            else:
                return INVALID
        good = isinstance(found, kind) and not (kind is int and isinstance(found, bool))
        return found if good or found is None else INVALID

    def text(self, *path: str | int) -> str:
        return self.get(str, *path) or NONE

    def number(self, *path: str | int, absent: str = "0") -> str:
        found = self.get(int, *path)
        return absent if found is None else str(found)

    def age(self, now: datetime) -> str:
        """Return the time since the creation, or since the start if that is not known."""
        created = ("metadata", "creationTimestamp")
        stamp = self.get(str, *created) or self.get(str, "status", "startTime")
        try:
            since = None if stamp is None else datetime.fromisoformat(stamp)
        except ValueError:
            return INVALID
        return age(since and (since if since.tzinfo else since.replace(tzinfo=UTC)), now)

    def failure(self) -> str:
        """Return the class of the latest failure, which earlier releases wrote as the first."""
        latest = self.get(dict, "status", "lastFailure")
        return self.text("status", "lastFailure" if latest else "firstFailure", "class")


def row(document: Any, wide: bool, now: datetime, namespaced: bool = False) -> tuple[str, ...]:
    """Return the cells of one job."""
    job = Cells(document)
    cells = [job.text("metadata", "namespace")] if namespaced else []
    cells += [
        job.text("metadata", "name"),
        job.text("status", "phase"),
        job.text("status", "rendezvous", "state"),
        job.number("status", "rendezvous", "round", absent=NONE),
        job.number("status", "nodes"),
        job.number("status", "wantedNodes"),
        job.number("status", "restarts"),
        job.age(now),
    ]
    if wide:
        most = job.number("spec", "maxNodes", absent=NONE)
        cells += [
            job.number("spec", "minNodes", absent=most),
            most,
            job.text("status", "rendezvous", "master"),
            job.text("status", "rendezvous", "cause", "kind"),
            job.failure(),
            job.number("status", "interruptions", "losses", absent=absent_count(document)),
            job.number("status", "interruptions", "preemptions", absent=absent_count(document)),
            job.number("status", "rounds", -1, "recoveryMs", absent=NONE),
        ]
    return tuple(cells)


def absent_count(document: Any) -> str:
    """Return the cell of an absent count: 0 only if others were counted."""
    return NONE if Cells(document).get(dict, "status", "interruptions") is None else "0"


def unreadable_row(namespace: str, name: str, wide: bool, namespaced: bool) -> tuple[str, ...]:
    """Return the cells of a job whose document cannot be read."""
    cells = ((namespace,) if namespaced else ()) + (name, UNREADABLE)
    return cells + (NONE,) * (len(header(wide, namespaced)) - len(cells))


def header(wide: bool, namespaced: bool = False) -> tuple[str, ...]:
    return (("NAMESPACE",) if namespaced else ()) + COLUMNS + (WIDE if wide else ())


CLIPPED = frozenset(
    {"NAMESPACE", "NAME", "POD", "NODE", "MASTER", "CAUSE", "START", "REASON", "MESSAGE"}
)
"""Columns of names and texts, which are clipped where a table is too wide; no number ever is."""
OMITTED = (
    "COLD",
    "RENDEZVOUS",
    "WORKERS",
    "FIRST STEP ms",
    "CHECKPOINT",
    "START",
    "AFTER",
    "WANTED",
    "RECOVERY ms",
)
"""Columns that a terminal too narrow for the table does without, in this order."""
_WORD = re.compile(r"\s*\S+")
GAPS = (3, 2, 1)
NARROWEST = 8
"""Minimum width of a clipped column."""


def columns(text: str) -> int:
    """Return the number of terminal columns of a text: East Asian wide characters take two."""
    if text.isascii():
        return len(text)
    return sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "FW" else 1


def aligned(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Format rows as lines, each column as wide as its widest cell.

    A cell has one line of printable characters, also for a name with others. Beyond `width`
    the gaps are narrowed, then the widest columns of `CLIPPED` lose the middle of their cells:
    a name's beginning and its index remain. If that is not enough, columns of `OMITTED` go.
    """
    rows = [tuple(map(one_cell, cells)) for cells in rows]
    widths = _widths(rows)
    gap = GAPS[0]
    if width is not None:
        for title in (None, *OMITTED):
            if title in rows[0]:
                at = rows[0].index(title)
                rows = [(*cells[:at], *cells[at + 1 :]) for cells in rows]
            gap, widths = _fitted(rows, width)
            if sum(widths) + gap * (len(widths) - 1) <= width:
                break
    return [
        (" " * gap)
        .join(_padded(clip(cell, size), size) for cell, size in zip(cells, widths, strict=True))
        .rstrip()
        for cells in rows
    ]


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(columns, column)) for column in zip(*rows, strict=True)]


def _fitted(rows: Sequence[Sequence[str]], width: int) -> tuple[int, list[int]]:
    """Return the gap and the widths of columns for this width, the smallest if none fit."""
    widths = _widths(rows)
    inside = [width - gap * (len(widths) - 1) for gap in GAPS]
    fits = [gap for gap, room in zip(GAPS, inside, strict=True) if sum(widths) <= room]
    if fits:
        return fits[0], widths
    narrowed = _clipped_widths(rows[0], widths, inside[1])
    if sum(narrowed) <= inside[1]:
        return GAPS[1], narrowed
    return GAPS[-1], _clipped_widths(rows[0], widths, inside[-1])


def _clipped_widths(titles: Sequence[str], widths: Sequence[int], room: int) -> list[int]:
    """Return the widths with the widest clipped columns narrowed until all fit, if they can."""
    narrowed = list(widths)
    while sum(narrowed) > room:
        at = max(
            (at for at, title in enumerate(titles) if title in CLIPPED),
            key=lambda at: narrowed[at],
            default=None,
        )
        if at is None or narrowed[at] <= max(NARROWEST, len(titles[at])):
            break
        narrowed[at] -= 1
    return narrowed


def clip(cell: str, size: int) -> str:
    """Return a text without its middle if it has more than `size` columns."""
    if columns(cell) <= size:
        return cell
    head = _beginning(cell, size // 2)
    rest = size - 1 - columns(head)
    return f"{head}…{_beginning(cell[::-1], rest)[::-1]}"


def _beginning(text: str, size: int) -> str:
    """Return the longest beginning of a text that has at most `size` columns."""
    while columns(text) > size:
        text = text[: -max(1, (columns(text) - size) // 2)]
    return text


def _padded(cell: str, size: int) -> str:
    return cell + " " * (size - columns(cell))


def wrapped(line: str, width: int | None, indent: int = 0) -> list[str]:
    """Return a text as lines of at most `width` columns; those after the first are indented."""
    if width is None or columns(line) <= width:
        return [line]
    first = line[: len(line) - len(line.lstrip(" "))]
    later = " " * max(indent, len(first))
    most = max(width, len(later) + NARROWEST)
    lines, current = [], first
    for word in _WORD.findall(line):
        if columns(current) + columns(word) > most and current.strip():
            lines.append(current)
            current = later
        left = word if current.strip() else word.lstrip()
        while columns(current) + columns(left) > most:  # longer than a line
            part = _beginning(left, most - columns(current))
            lines.append(current + part)
            current, left = later, left[len(part) :]
        current += left
    return [*lines, current]


def job_list(items: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return several objects as the List that kubectl prints in JSON and YAML."""
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}


PHASES = {
    "detectMs": "DETECT ms",
    "stopMs": "STOP ms",
    "backoffMs": "BACKOFF ms",
    "joinMs": "JOIN ms",
    "confirmMs": "CONFIRM ms",
    "startMs": "START ms",
}
"""Phases of a recovery, which are columns of the wide table."""


def round_lines(rounds: Sequence[Json], wide: bool = False, width: int | None = None) -> list[str]:
    """Format rounds with causes and milliseconds; fields that a release lacks are `-`."""
    return _table(rounds, wide, width, after=False)


def history_lines(
    rounds: Sequence[Mapping[str, Any]], wide: bool = False, width: int | None = None
) -> list[str]:
    """Format every round of a run with its cause and its time since the start."""
    return _table(rounds, wide, width, after=True)


def _table(
    rounds: Sequence[Mapping[str, Any]], wide: bool, width: int | None, after: bool
) -> list[str]:
    phases = PHASES if wide else {}
    titles = ["ROUND", "CAUSE", "NODES", *phases.values(), "RECOVERY ms", "FIRST STEP ms", "COLD"]
    rows = [[*(["AFTER"] if after else []), *titles, *(["LOST STEPS"] if wide else [])]]
    keys = ("nodes", *phases, "recoveryMs", "firstStepMs", "coldNodes")
    keys += ("lostSteps",) if wide else ()
    for item in rounds:
        job = Cells(dict(item))
        cells = [job.number("round"), _cause(job), *(job.number(key, absent="-") for key in keys)]
        seconds = item.get("finalSeconds")
        known = isinstance(seconds, float | int)
        rows.append([*([f"{seconds:.1f} s" if known else "-"] if after else []), *cells])
    return aligned(rows, None if wide else width)


def _cause(job: Cells) -> str:
    """Format a cause as `leave: digits-1`."""
    members = job.get(list, "members") or []
    named = ", ".join(map(str, members)) if isinstance(members, list) else INVALID
    return ": ".join(part for part in (job.text("cause"), named) if part)
