"""Demo's timeline: the interval of each member's appearance."""

from __future__ import annotations

from scripts.demo import Moment, spans

MOMENTS = [
    Moment(0.0, {"d-0": ("starting", "")}),
    Moment(1.0, {"d-0": ("running", "0"), "d-1": ("starting", "")}),
    Moment(2.0, {"d-0": ("running", "0"), "d-1": ("waiting", "1")}),
    Moment(3.0, {"d-0": ("running", "1"), "d-1": ("running", "0")}),
    Moment(5.0, {"d-0": ("Failed", ""), "d-1": ("running", "0")}),
]


def test_equal_consecutive_states_are_joined_and_rank_change_is_not() -> None:
    assert spans(MOMENTS, "d-0", 9.0) == [
        (0.0, 1.0, "starting", ""),
        (1.0, 3.0, "running", "0"),
        (3.0, 5.0, "running", "1"),
    ]


def test_ranks_are_shown_only_for_running_nodes() -> None:
    assert spans(MOMENTS, "d-1", 9.0) == [
        (1.0, 2.0, "starting", ""),
        (2.0, 3.0, "waiting", ""),
        (3.0, 9.0, "running", "0"),
    ]
