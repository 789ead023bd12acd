"""Clock skew: between the API server and the operator, and between a node and both."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob_operator.domain.observed.pod_state import clamp_end, first_seen_ends
from elasticjob_operator.domain.plan.planner import plan
from elasticjob_operator.kubernetes.requests import clock_offset_seconds
from tests.unit.operator.builders import NOW, ago, job, later, observed, pod

HOUR = 3600.0


def answer(at: float) -> dict[str, str]:
    """Return the headers of a server whose clock shows `at`: seconds since 1970."""
    return {"Date": formatdate(int(at), usegmt=True)}


@given(
    st.floats(-2 * HOUR, 2 * HOUR),
    st.lists(st.tuples(st.floats(0, 9), st.floats(0, 0.5), st.floats(0, 0.5)), min_size=1),
)
def test_clock_skew_is_known_to_a_second_from_first_answer(
    ahead: float, answers: list[tuple[float, float, float]]
) -> None:
    own, known = NOW.timestamp(), 0.0
    for pause, there, back in answers:
        sent = own + pause
        own = sent + there + back
        known = clock_offset_seconds(known, answer(sent + there + ahead), sent, own)
        assert abs(known - ahead) <= 1.0 + there + back + 1e-3


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 5), st.floats(0, 5)), min_size=1))
def test_equal_clocks_are_not_corrected(answers: list[tuple[float, float, float]]) -> None:
    own, known = NOW.timestamp(), 0.0
    for pause, there, back in answers:
        sent = own + pause
        own = sent + there + back
        known = clock_offset_seconds(known, answer(sent + there), sent, own)
    assert known == 0.0


@pytest.mark.parametrize("said", ["", "soon", "Sat, 99 Nov 2026 03:00:00 GMT"])
def test_answer_without_date_keeps_clock_skew(said: str) -> None:
    assert clock_offset_seconds(7.0, {"Date": said}, 1.0, 2.0) == 7.0


@pytest.mark.parametrize("told", [later(HOUR), ago(HOUR), ago(1)], ids=["ahead", "behind", "alike"])
def test_node_with_wrong_clock_delays_no_pod(told: datetime) -> None:
    """The second consecutive launch failure delays the next pod by two seconds."""
    first = pod(0).stillborn(30, "no python3").get()
    second = replace(pod(1).stillborn(2).get(), ended_at=told)
    seen: dict[str, datetime] = {}
    waits = []
    for now in (ago(0), later(1), later(2), later(3)):
        pods = (first, second)
        seen = first_seen_ends(pods, seen, now)
        known = observed(*(clamp_end(one, seen) for one in pods))
        planned = plan(job(minNodes=1, maxNodes=1), known, now)
        waits.append(not any(type(action).__name__ == "CreatePod" for action in planned.actions))
    assert waits[-2:] == [False, False]
    assert waits == sorted(waits, reverse=True)


def test_first_seen_end_is_forgotten_with_its_pod() -> None:
    ended = pod(0).stillborn(30).get()
    assert set(first_seen_ends([ended, pod(1).get()], {}, NOW)) == {ended.uid}
    assert first_seen_ends([pod(1).get()], {ended.uid: NOW}, NOW) == {}
