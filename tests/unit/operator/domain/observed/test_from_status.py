"""Complete recovery of a rendezvous's view from a status."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from enum import EnumType
from typing import Any, get_args, get_origin, get_type_hints

from elasticjob_operator.domain.observed.agent_records import rendezvous_from_status
from elasticjob_operator.domain.observed.state import RendezvousView
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model.status import (
    CauseStatus,
    FailureStatus,
    RendezvousStatus,
    RoundStatus,
    Status,
)
from tests.unit.operator.builders import NOW, final_round, job, observed, running

VALUES = {
    bool: True,
    int: 7000,
    float: 7000.0,
    str: "word",
    datetime: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
}


def filled(kind: Any) -> Any:
    """Return a value of this type in which no field has its default."""
    if kind in VALUES:
        return VALUES[kind]
    if isinstance(kind, EnumType):
        return list(kind)[1]
    if arguments := [one for one in get_args(kind) if one not in (type(None), ...)]:
        value = filled(arguments[0])
        origin = get_origin(kind)
        if origin is Mapping:
            return {value: filled(arguments[1])}
        return (value,) if origin is tuple else value
    hints = get_type_hints(kind)
    return kind(**{one.name: filled(hints[one.name]) for one in fields(kind)})


def test_rendezvous_view_survives_status_round_trip() -> None:
    view = filled(RendezvousView)
    status = next_status(job(), observed(*running(1)), view, NOW)
    assert status.rendezvous is not None
    assert status.members
    assert status.rounds
    assert status.first_failure is not None
    again = next_status(job(status), observed(*running(1)), rendezvous_from_status(status), NOW)
    for part in ("rendezvous", "rounds", "first_failure", "restarts", "interruptions"):
        assert getattr(again, part) == getattr(status, part), part


def test_empty_status_gives_empty_view() -> None:
    assert rendezvous_from_status(Status()) == RendezvousView()
    seen = final_round(3, 5)
    status = next_status(job(), observed(*running(3)), seen, NOW)
    assert rendezvous_from_status(status).round == 5


def test_cause_of_a_newer_release_is_left_out() -> None:
    cause = CauseStatus(kind="eclipse", members=["job-1"])
    known = RoundStatus(round=1, cause="start", nodes=2)
    newer = RoundStatus(round=2, cause="eclipse", nodes=2)
    status = Status(rendezvous=RendezvousStatus(round=2, cause=cause), rounds=[known, newer])
    view = rendezvous_from_status(status)
    assert (view.round, view.cause, [one.number for one in view.rounds]) == (2, None, [1])
    again = next_status(job(status), observed(*running(1)), view, NOW)
    assert again.rounds == status.rounds


def test_failure_of_a_node_is_no_record_and_stays_in_the_status() -> None:
    lost = FailureStatus(round=1, pod="job-1", class_="NodeLost")
    status = Status(first_failure=lost)
    assert rendezvous_from_status(status).first_failure is None
    again = next_status(job(status), observed(*running(1)), rendezvous_from_status(status), NOW)
    assert again.first_failure == lost.model_copy(update={"returned": False})
