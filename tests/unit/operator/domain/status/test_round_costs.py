"""Time costs of a round, in numbers and in words."""

from __future__ import annotations

from dataclasses import fields
from datetime import timedelta
from typing import Any

import pytest

from elasticjob_operator.domain.status.rounds import (
    began_at,
    history,
    parts_ms,
    phases_text,
    recovery_ms,
    recovery_text,
    round_status,
    seconds_text,
)
from elasticjob_operator.model.status import RoundStatus
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind
from elasticjob_rendezvous.protocol.records.timings import History
from tests.unit.operator.builders import NOW

WHOLE = RoundStatus(
    round=2, cause="loss", nodes=3, detect_ms=5, stop_ms=10, join_ms=20, confirm_ms=30,
    start_ms=400, first_step_ms=1200,
)  # fmt: skip


def test_recovery_parts_are_in_chronological_order() -> None:
    assert phases_text(WHOLE) == (
        "detect 5 ms, stop 10 ms, join 20 ms, confirm 30 ms, start 400 ms, first step 1200 ms"
    )


def test_listed_recovery_parts_add_up_to_the_recovery() -> None:
    assert recovery_text(WHOLE) == (
        "detect 5 ms, stop 10 ms, join 20 ms, confirm 30 ms, start 400 ms; first step 1200 ms later"
    )
    joined = WHOLE.model_copy(update={"cause": "join", "first_step_ms": None})
    assert recovery_text(joined) == "stop 10 ms, join 20 ms, confirm 30 ms, start 400 ms"


def test_recovery_ends_when_workers_run_not_at_first_step() -> None:
    assert recovery_ms(WHOLE) == 465


def test_back_off_is_part_of_the_recovery() -> None:
    assert recovery_ms(WHOLE.model_copy(update={"backoff_ms": 2000})) == 2465


def test_recovery_is_unknown_before_workers_run() -> None:
    assert recovery_ms(WHOLE.model_copy(update={"start_ms": None})) is None


def test_round_of_older_agent_sums_its_known_parts() -> None:
    assert recovery_ms(WHOLE.model_copy(update={"confirm_ms": None})) == 435


@pytest.mark.parametrize("ms", [2**53, 10**18])
def test_begin_of_a_round_that_lasted_thousands_of_years_is_unknown(ms: int) -> None:
    """A pod's author may write any duration into its records."""
    assert began_at(NOW, WHOLE.model_copy(update={"stop_ms": ms})) is None
    assert began_at(NOW, WHOLE) == NOW - timedelta(milliseconds=65)


@pytest.mark.parametrize("cause", ["join", "scaleDown"])
def test_detection_of_a_planned_round_is_not_recovery_time(cause: str) -> None:
    waited = WHOLE.model_copy(update={"cause": cause, "detect_ms": 11_463})
    assert recovery_ms(waited) == 460
    assert phases_text(waited).startswith("detect 11463 ms, stop 10 ms"), "it is told all the same"


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (99, "99 ms"),
        (900, "0.9 s"),
        (9_949, "9.9 s"),
        (9_960, "10 s"),
        (119_400, "119 s"),
        (120_000, "2 min"),
        (200_000, "3 min 20 s"),
    ],
)
def test_duration_format(ms: int, text: str) -> None:
    assert seconds_text(ms) == text


def test_every_time_of_a_record_is_shown_in_status_and_text() -> None:
    names = [one.name for one in fields(History) if one.name.endswith("_ms")]
    names.remove("final_ms")
    names.remove("lost_ms")  # of steps, not a phase
    times: dict[str, Any] = {name: ms for ms, name in enumerate(names, 1)}
    found = History(1, Cause(CauseKind.LOSS), 2, **times)
    assert sorted(parts_ms(found).values()) == sorted(times.values())
    shown = round_status(found, "")
    assert {name: getattr(shown, name) for name in names} == times
    assert history(shown) == found
