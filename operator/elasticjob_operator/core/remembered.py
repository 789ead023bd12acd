"""Rendezvous view read back from a job's status: the inverse of `status`.

Fields with the same name in both are copied by name.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from elasticjob_operator.core.costs import cause_of, history
from elasticjob_operator.core.culprits import failure_of
from elasticjob_operator.core.rendezvous_view import RendezvousView
from elasticjob_operator.model.status import Status
from elasticjob_rendezvous.core.records import Counts


def remembered(status: Status) -> RendezvousView:
    """Return the view that was written to the status.

    It lacks the outcome, which only the conditions hold, and the members, which only agents report.
    """
    found: dict[str, Any] = _of(RendezvousView, status.rendezvous) if status.rendezvous else {}
    if status.rendezvous is not None and status.rendezvous.cause is not None:
        cause = status.rendezvous.cause
        found["cause"] = cause_of(cause.kind, cause.members, cause.detail, cause.reasons)
    if status.first_failure is not None:
        found["first_failure"] = failure_of(status.first_failure)
    return RendezvousView(
        **found,
        rounds=tuple(one for one in map(history, status.rounds) if one is not None),
        failures_charged=status.restarts,
        interruptions=Counts(**_of(Counts, status.interruptions)),
    )


def _of(kind: type[Any], shown: Any) -> dict[str, Any]:
    """Return the fields of this class that the status shows and sets, with lists as tuples."""
    values = {one.name: getattr(shown, one.name, None) for one in fields(kind)}
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if value is not None
    }
