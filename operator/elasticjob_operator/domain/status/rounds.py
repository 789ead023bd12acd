"""Cost of a round: its phases in order of time, and their sum.

Also the conversions between the record of a round and its entry in the status. Fields with the same
name in both, such as the phases, are copied by name.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

from elasticjob_operator.model.status import MAX_REASONS, MAX_ROUND_MEMBERS, RoundStatus
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind
from elasticjob_rendezvous.protocol.records.roster import natural_order
from elasticjob_rendezvous.protocol.records.timings import History

PLANNED_CAUSES = (CauseKind.JOIN, CauseKind.SCALE_DOWN)
"""Causes without a failure to recover from: training continues until the decision."""
RECOVERY = ("detect", "stop", "backoff", "join", "confirm", "start")
"""Phases from the first symptom until all workers run again."""
_OF_RECORD = {field.name for field in fields(History)} - {"cause"}
SHARED = tuple(name for name in RoundStatus.model_fields if name in _OF_RECORD)
"""Fields with the same name and meaning in the record and in the status."""


def round_status(found: History, reason: str) -> RoundStatus:
    """Return the round's entry in the status; `reason` is that of departures, if known."""
    shared: dict[str, Any] = {name: getattr(found, name) for name in SHARED}
    shown = RoundStatus(
        **shared
        | {
            "cold_reason": found.cold_reason or None,
            "lost_reason": found.lost_reason or None,
        },
        round=found.number,
        cause=found.cause.kind.value,
        members=sorted(found.cause.members, key=natural_order)[:MAX_ROUND_MEMBERS],
        reason=reason,
        detail=found.cause.detail,
        reasons=list(found.cause.reasons[:MAX_REASONS]),
        final_time=final_at(found),
    )
    return shown.model_copy(update={"recovery_ms": recovery_ms(shown)})


def history(shown: RoundStatus) -> History | None:
    """Return the record of a round in the status, with whole seconds of its time and at most
    `MAX_ROUND_MEMBERS` members; None if its cause cannot be read back."""
    cause = cause_of(shown.cause, shown.members, shown.detail, shown.reasons)
    if cause is None:
        return None
    shared = {name: getattr(shown, name) for name in SHARED}
    known: dict[str, Any] = {name: value for name, value in shared.items() if value is not None}
    at = shown.final_time
    final_ms = 0 if at is None else round(at.timestamp() * 1000)
    return History(number=shown.round, cause=cause, final_ms=final_ms, **known)


def cause_of(
    kind: str, members: Iterable[str], detail: str, reasons: Iterable[str]
) -> Cause | None:
    """Return the record of a cause in the status; None if only a newer release knows its kind."""
    with suppress(ValueError):
        return Cause(CauseKind(kind), tuple(members), detail, reasons=tuple(reasons))
    return None


def final_at(found: History) -> datetime | None:
    """Return the UTC time at which the round became final; None if unknown."""
    return utc_time(found.final_ms)


def utc_time(utc_ms: int) -> datetime | None:
    """Return the UTC time; None for 0 and for a value out of range."""
    with suppress(ValueError, ArithmeticError, OSError):
        return datetime.fromtimestamp(utc_ms / 1000, UTC) if utc_ms else None
    return None


def parts_ms(found: RoundStatus | History) -> dict[str, int]:
    """Return the known phases of a round in milliseconds, in order; the first step comes last."""
    known = {
        "detect": found.detect_ms,
        "stop": found.stop_ms,
        "backoff": found.backoff_ms,
        "join": found.join_ms,
        "confirm": found.confirm_ms,
        "start": found.start_ms,
        "first step": found.first_step_ms,
    }
    return {part: ms for part, ms in known.items() if ms is not None}


def recovery_ms(found: RoundStatus) -> int | None:
    """Return the sum of the known phases until all workers ran; None before they do."""
    if found.start_ms is None:
        return None
    return sum(recovery_parts_ms(found).values())


def recovery_parts_ms(found: RoundStatus) -> dict[str, int]:
    """Return the phases of the recovery; for a join or scale-down those of the pause."""
    none = "detect" if found.cause in PLANNED_CAUSES else ""
    return {p: ms for p, ms in parts_ms(found).items() if p in RECOVERY and p != none}


def lasted_ms(found: RoundStatus | History) -> int:
    """Return the sum of the known phases until the round was final."""
    known = parts_ms(found)
    return sum(known.get(part, 0) for part in RECOVERY if part != "start")


def began_at(final: datetime, found: RoundStatus | History) -> datetime | None:
    """Return the time at which a round that was final then began; None for one out of range."""
    with suppress(OverflowError):
        return final - timedelta(milliseconds=lasted_ms(found))
    return None


def phases_text(found: RoundStatus) -> str:
    """Return text such as `detect 5 ms, stop 120 ms`; empty if no phase is known."""
    return ", ".join(f"{part} {ms} ms" for part, ms in parts_ms(found).items())


def recovery_text(found: RoundStatus) -> str:
    """Return text such as `stop 120 ms, start 300 ms; first step 80 ms later`; the phases
    before the semicolon add up to the recovery time."""
    text = ", ".join(f"{part} {ms} ms" for part, ms in recovery_parts_ms(found).items())
    if found.first_step_ms is None:
        return text
    return f"{text}; first step {found.first_step_ms} ms later"


def cold_text(found: RoundStatus) -> str:
    """Return the nodes with cold-started workers and the reason; empty if none are known."""
    cold, nodes = found.cold_nodes, found.nodes
    if not cold:
        return ""
    which = f"all {nodes}" if cold >= nodes else f"{cold} of {nodes}"
    where = "" if nodes == 1 else f" on {which} nodes"
    reason = f": {found.cold_reason}" if found.cold_reason else ""
    return f"workers started cold{where}{reason}"


def seconds_text(ms: int) -> str:
    """Format a duration: 45 ms, 0.9 s, 12 s, 3 min 20 s."""
    if ms < 100:
        return f"{ms} ms"
    if ms < 9_950:
        return f"{ms / 1000:.1f} s"
    seconds = round(ms / 1000)
    if seconds < 120:
        return f"{seconds} s"
    minutes, rest = divmod(seconds, 60)
    return f"{minutes} min {rest} s" if rest else f"{minutes} min"
