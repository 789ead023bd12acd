"""Timeline of a job's rounds as SVG: its nodes over time, and the phases of each round change.

The picture needs no library. Its colours follow the viewer's light or dark setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from xml.sax.saxutils import escape

from elasticjob_cli.commands.tables import Cells
from elasticjob_rendezvous.protocol.records.members import CauseKind
from elasticjob_rendezvous.protocol.text import counted, one_cell, shortened

PHASES = {
    "detectMs": ("detect", "#d1495b"),
    "stopMs": ("stop", "#edae49"),
    "backoffMs": ("back-off", "#9aa0a6"),
    "joinMs": ("join", "#1b6ca8"),
    "confirmMs": ("confirm", "#66a182"),
    "startMs": ("start", "#8d6a9f"),
    "firstStepMs": ("first step", "#c9b6d6"),
}
"""Phases of a round change in their order: field, name, colour."""
DARK_PHASES = ("detectMs", "joinMs", "startMs")
"""Phases whose colour needs a light label."""

WIDTH = 960
MARGIN = 56
OVERVIEW_HEIGHT = 150
ROW_HEIGHT = 26
LABEL_WIDTH = 300
MAX_ROWS = 40
"""Maximum number of round changes with a row of their own: the newest."""
LONGEST_LABEL = 42
MIN_GAP = 46
"""Minimum distance of two labels in the overview."""
LABEL_ROOM = 44
"""Minimum width of a phase with a label of its duration."""
MAX_COUNT = 10**15
"""Maximum of a number in a round; a larger one is damaged."""
ZOOMS = (10, 100, 1000)
"""Factors by which a short round change is magnified beside a longer one."""
STYLE = """
text { fill: #202124; font: 12px system-ui, "DejaVu Sans", sans-serif; }
text.soft { fill: #5f6368; }
text.title { font-size: 15px; font-weight: 600; }
text.in { fill: #202124; font-size: 11px; }
text.light { fill: #ffffff; font-size: 11px; }
.paper { fill: #ffffff; }
.node { fill: #cfe3f1; }
.line { stroke: #d6d9dc; fill: none; }
.loss { fill: #d1495b; }
@media (prefers-color-scheme: dark) {
  text { fill: #e8eaed; }
  text.soft { fill: #a4a9ae; }
  text.in { fill: #202124; }
  text.light { fill: #ffffff; }
  .paper { fill: #17191c; }
  .node { fill: #24465e; }
  .line { stroke: #3a3f45; }
}
"""


@dataclass(frozen=True, slots=True)
class Change:
    """One round, and the cost of its formation.

    Args:
        kind: kind of the cause.
        members: names of the pods that caused the round.
        at: Unix time in seconds at which the round became final.
        phases: milliseconds of each known phase, by field.
        recovery_ms: milliseconds without training until all workers had started; None if unknown.
        cold: number of nodes whose workers were started cold.
        lost_steps: minimum number of steps that the workers had to repeat; None if unknown.
    """

    number: int
    kind: str
    members: str
    nodes: int
    at: float
    phases: Mapping[str, int]
    recovery_ms: int | None = None
    cold: int = 0
    lost_steps: int | None = None

    @property
    def first(self) -> bool:
        """True for a start, before which nothing was interrupted."""
        return self.kind == CauseKind.START

    @property
    def cause(self) -> str:
        """Kind of the cause, with the pods that caused the round."""
        return ": ".join(part for part in (self.kind, self.members) if part)


def changes_of(rounds: Sequence[Any]) -> list[Change]:
    """Return the rounds that became final, by time; damaged entries are left out."""
    found = [one for item in rounds if isinstance(item, dict) and (one := _change(item))]
    return sorted(found, key=lambda one: (one.at, one.number))


def _change(item: Mapping[str, Any]) -> Change | None:
    number, nodes = _count(item, "round"), _count(item, "nodes")
    try:
        at = datetime.fromisoformat(str(item.get("finalTime")))
        at = (at if at.tzinfo else at.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    if number is None or nodes is None:
        return None
    members = item.get("members")
    names = ", ".join(map(str, members)) if isinstance(members, list) else ""
    phases = {name: ms for name in PHASES if (ms := _count(item, name)) is not None}
    recovery, cold = _count(item, "recoveryMs"), _count(item, "coldNodes") or 0
    lost = _count(item, "lostSteps")
    kind = str(item.get("cause") or "unknown")
    return Change(number, kind, names, nodes, at.timestamp(), phases, recovery, cold, lost)


def end_of(job: Cells, now: float) -> float:
    """Return the Unix time of a job's end; `now` while it has none."""
    try:
        return datetime.fromisoformat(str(job.get(str, "status", "completionTime"))).timestamp()
    except (ValueError, OverflowError):
        return now


def _count(item: Mapping[str, Any], name: str) -> int | None:
    """Return a number from 0 to `MAX_COUNT`; None for anything else."""
    found = item.get(name)
    if not isinstance(found, int) or isinstance(found, bool):
        return None
    return found if 0 <= found <= MAX_COUNT else None


def svg(title: str, changes: Sequence[Change], end: float, embedded: bool = False) -> str:
    """Return the picture.

    Args:
        title: name of the job, as shown.
        changes: rounds in order of time; at least one.
        end: Unix time of the job's end, or of now.
        embedded: True for a part of a page that has `STYLE` and the title itself.
    """
    rows = changes[-MAX_ROWS:]
    top = 24 if embedded else 52
    rows_top = top + OVERVIEW_HEIGHT + 64
    height = rows_top + ROW_HEIGHT * len(rows) + 36
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">',
        f"<title>{_text(title)}</title>",
        *([] if embedded else [f"<style>{STYLE}</style>"]),
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        *([] if embedded else [_label(MARGIN, 28, title, "title")]),
        *_overview(changes, max(end, changes[-1].at), top),
        *_zoom(rows, len(changes), rows_top),
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def _overview(changes: Sequence[Change], end: float, top: int) -> list[str]:
    """Return the nodes over time, with a mark and the duration of each interruption."""
    begin = changes[0].at
    span = max(end - begin, 1.0)
    room = WIDTH - 2 * MARGIN
    most = max(one.nodes for one in changes) or 1
    bottom = top + OVERVIEW_HEIGHT

    def x(at: float) -> float:
        return MARGIN + room * (at - begin) / span

    found = []
    for number in range(1, most + 1) if most <= 8 else ((most + 1) // 2, most):
        y = bottom - (OVERVIEW_HEIGHT - 24) * number / most
        found.append(f'<path class="line" d="M{MARGIN} {y:.1f}H{WIDTH - MARGIN}"/>')
        found.append(_label(MARGIN - 8, y + 4, str(number), "soft", "end"))
    for one, until in zip(changes, [*(each.at for each in changes[1:]), end], strict=True):
        y = bottom - (OVERVIEW_HEIGHT - 24) * one.nodes / most
        width = max(x(until) - x(one.at), 0.5)
        found.append(
            f'<rect class="node" x="{x(one.at):.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{bottom - y:.1f}"><title>{_text(_sentence(one))}</title></rect>'
        )
    labels: list[tuple[int, float]] = []
    for change in changes:
        if change.first or change.recovery_ms is None:
            continue
        started = change.phases.get("startMs", 0)
        left = x(max(begin, change.at - (change.recovery_ms - started) / 1000))
        width = max(x(min(end, change.at + started / 1000)) - left, 2.0)
        found.append(
            f'<rect class="loss" x="{left:.1f}" y="{top}" width="{width:.1f}" '
            f'height="{OVERVIEW_HEIGHT}"><title>{_text(_sentence(change))}</title></rect>'
        )
        labels.append((change.recovery_ms, left))
    found += [
        _label(left, top - 5, seconds_text(ms), "", "middle")
        for ms, left in _without_overlap(labels)
    ]
    found.append(f'<path class="line" d="M{MARGIN} {bottom}H{WIDTH - MARGIN}"/>')
    for part in range(5):
        at = begin + span * part / 4
        anchor = ("start", "middle", "middle", "middle", "end")[part]
        stamp = _duration(at - begin) if part else f"{datetime.fromtimestamp(begin, UTC):%H:%M:%S}"
        found.append(_label(x(at), bottom + 16, stamp, "soft", anchor))
    found.append(_label(MARGIN, bottom + 34, "nodes over time (UTC); red: no training", "soft"))
    return found


def _zoom(rows: Sequence[Change], total: int, top: int) -> list[str]:
    """Return a row for each round change: its phases with their durations, on one scale.

    A change far shorter than the longest one is magnified, and its label has the factor.
    """
    left, room = MARGIN + LABEL_WIDTH, WIDTH - 2 * MARGIN - LABEL_WIDTH - 80
    longest = max((sum(row.phases.values()) for row in rows), default=0) or 1
    found, at = [], left
    for name, colour in PHASES.values():
        found.append(f'<rect x="{at}" y="{top - 22}" width="10" height="10" fill="{colour}"/>')
        found.append(_label(at + 14, top - 13, name, "soft"))
        at += 30 + 7 * len(name)
    for place, one in enumerate(rows):
        y = top + ROW_HEIGHT * place
        label = f"{one.number}  {shortened(one.cause, LONGEST_LABEL)}"
        found.append(_label(MARGIN, y + 14, label))
        zoom = _zoom_factor(sum(one.phases.values()), longest)
        x = float(left)
        for field, ms in one.phases.items():
            name, colour = PHASES[field]
            width = room * zoom * ms / longest
            found.append(
                f'<rect x="{x:.1f}" y="{y + 3}" width="{max(width, 0.5):.1f}" height="16" '
                f'fill="{colour}"><title>{name}: {seconds_text(ms)}</title></rect>'
            )
            if width >= LABEL_ROOM:
                kind = "light" if field in DARK_PHASES else "in"
                found.append(_label(x + width / 2, y + 15, seconds_text(ms), kind, "middle"))
            x += width
        factor = f" (x{zoom})" if zoom > 1 else ""
        found.append(_label(x + 6, y + 15, _cost(one) + factor, "soft"))
    y = top + ROW_HEIGHT * len(rows) + 22
    cut = f"the newest {len(rows)} of {total} rounds; " if len(rows) < total else ""
    zoomed = "; x: magnified" if any("(x" in element for element in found) else ""
    text = f"{cut}bars: {seconds_text(longest)} at full width{zoomed}"
    found.append(_label(MARGIN, y, text, "soft"))
    return found


def _without_overlap(labels: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the labels (duration, position) that have room, longer durations first."""
    found: list[tuple[int, float]] = []
    for ms, at in sorted(labels, reverse=True):
        if all(abs(at - other) >= MIN_GAP for _, other in found):
            found.append((ms, at))
    return found


def _zoom_factor(ms: int, longest: int) -> int:
    """Return the largest factor by which a round change still fits beside the longest one."""
    return max((factor for factor in ZOOMS if 0 < ms * factor <= longest), default=1)


def _cost(one: Change) -> str:
    """Return the time, the lost steps and the cold starts of a round change."""
    parts = [
        "" if one.recovery_ms is None else seconds_text(one.recovery_ms),
        f"{counted(one.lost_steps, 'step')} lost" if one.lost_steps else "",
        f"{one.cold} cold" if one.cold else "",
    ]
    return ", ".join(part for part in parts if part)


def _sentence(one: Change) -> str:
    cost = "" if one.recovery_ms is None else f", recovered in {seconds_text(one.recovery_ms)}"
    if one.lost_steps is not None:
        cost += f", {counted(one.lost_steps, 'step')} lost"
    nodes = counted(one.nodes, "node")
    when = datetime.fromtimestamp(one.at, UTC)
    return f"round {one.number} ({one.cause}), {nodes}, final at {when:%H:%M:%S}{cost}"


def seconds_text(ms: int) -> str:
    """Format milliseconds: 62 ms, 0.4 s, 12 s."""
    if ms < 100 or ms > MAX_COUNT:
        return f"{ms} ms"
    return f"{ms / 1000:.1f} s" if ms < 10_000 else f"{ms / 1000:.0f} s"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _label(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named} text-anchor="{anchor}">{_text(text)}</text>'


def _text(text: str) -> str:
    return escape(one_cell(text))


def page(title: str, picture: str, sentences: Sequence[str]) -> str:
    """Return an HTML page with the picture and sentences below it; it loads nothing."""
    text = "".join(f"<p>{_text(line)}</p>\n" for line in sentences)
    return (
        "<!doctype html>\n"
        f'<html lang="en"><meta charset="utf-8"><title>{_text(title)}</title>\n'
        '<meta name="color-scheme" content="light dark">\n'
        "<style>body { margin: 2em auto; max-width: 960px; font: 14px system-ui, sans-serif }\n"
        "svg { max-width: 100%; height: auto }</style>\n"
        f"{picture}{text}</html>\n"
    )
