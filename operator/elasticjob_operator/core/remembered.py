"""Rendezvous view read back from a job's status: the inverse of `status`.

Fields are copied by name, so that every field that is shown is also read back.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from elasticjob_operator.core.costs import cause_of, history
from elasticjob_operator.core.culprits import failure_of
from elasticjob_operator.core.rendezvous_view import (
    MemberView,
    RendezvousView,
)
from elasticjob_operator.model.status import Status
from elasticjob_rendezvous.core.records import Counts

View = TypeVar("View")


def remembered(status: Status) -> RendezvousView:
    """Return the view that was written to the status, without the outcome, which only the
    conditions hold."""
    found: dict[str, Any] = _of(RendezvousView, status.rendezvous) if status.rendezvous else {}
    if status.rendezvous is not None and status.rendezvous.cause is not None:
        cause = status.rendezvous.cause
        found["cause"] = cause_of(cause.kind, cause.members, cause.detail)
    if status.first_failure is not None:
        found["first_failure"] = failure_of(status.first_failure)
    return RendezvousView(
        **found,
        members=tuple(_made(MemberView, one) for one in status.members),
        rounds=tuple(one for one in map(history, status.rounds) if one is not None),
        failures_charged=status.restarts,
        interruptions=_made(Counts, status.interruptions),
    )


def _made(kind: type[View], shown: Any) -> View:
    return kind(**_of(kind, shown))


def _of(kind: type[Any], shown: Any) -> dict[str, Any]:
    """Return the fields of a view that the status shows and sets, with lists as tuples."""
    values = {one.name: getattr(shown, one.name, None) for one in fields(kind)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if value is not None
    }
