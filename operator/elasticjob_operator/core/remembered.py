"""Rendezvous view read back from a job's status: the inverse of `status`.

Fields are copied by name, so that every field that is shown is also read back.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields
from typing import Any, TypeVar

from elasticjob_operator.core.rendezvous_view import (
    FailureView,
    MemberView,
    RendezvousView,
    RoundView,
)
from elasticjob_operator.model.status import CauseStatus, Status
from elasticjob_rendezvous.core.records import Cause, CauseKind, Counts

View = TypeVar("View")

_SHOWN_AS = {(RoundView, "final_at"): "final_time", (FailureView, "kind"): "class_"}


def remembered(status: Status) -> RendezvousView:
    """Return the view that was written to the status, without the outcome, which only the
    conditions hold."""
    found: dict[str, Any] = _of(RendezvousView, status.rendezvous) if status.rendezvous else {}
    if status.rendezvous is not None and status.rendezvous.cause is not None:
        found["cause"] = _cause(status.rendezvous.cause)
    if status.first_failure is not None:
        found["first_failure"] = _made(FailureView, status.first_failure)
    return RendezvousView(
        **found,
        members=tuple(_made(MemberView, one) for one in status.members),
        rounds=tuple(_made(RoundView, one) for one in status.rounds),
        failures_charged=status.restarts,
        interruptions=_made(Counts, status.interruptions),
    )


def _cause(shown: CauseStatus) -> Cause | None:
    """Return the cause; None if only a newer release knows its kind."""
    with suppress(ValueError):
        return Cause(CauseKind(shown.kind), tuple(shown.members), shown.detail)
    return None


def _made(kind: type[View], shown: Any) -> View:
    return kind(**_of(kind, shown))


def _of(kind: type[Any], shown: Any) -> dict[str, Any]:
    """Return the fields of a view that the status shows and sets, with lists as tuples."""
    names = {one.name: _SHOWN_AS.get((kind, one.name), one.name) for one in fields(kind)}
    values = {name: getattr(shown, there, None) for name, there in names.items()}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if value is not None
    }
