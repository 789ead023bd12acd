"""Causes of rounds on torch's backends: the agents only know that members wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob_operator.domain.observed.agent_records import Departure, PodHistory, with_causes
from elasticjob_operator.domain.observed.state import NodeState, Pod, RendezvousView
from elasticjob_operator.model import RendezvousState
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind
from tests.unit.operator.builders import final_round, history, member, pod, running


def round_of(number: int, *pods: Pod, cause: str = "join") -> RendezvousView:
    members = tuple(
        member(one.name, "running", node=one.node or "", round=number, id=one.uid) for one in pods
    )
    rounds = tuple(history(n, "start" if n == 1 else cause, 2) for n in range(1, number + 1))
    return final_round(
        len(pods),
        number,
        members=members,
        ranks={one.id: rank for rank, one in enumerate(members)},
        rounds=rounds,
        cause=Cause(CauseKind(cause if number > 1 else "start")),
    )


GONE = replace(pod(1).failed().get(), exit_code=137)


@pytest.mark.parametrize(
    ("after", "kind"),
    [
        (pod(1).terminating().get(), CauseKind.LEAVE),
        (pod(1).on(NodeState.NOT_READY).get(), CauseKind.LOSS),
        (pod(1).terminating().on(NodeState.NOT_READY).get(), CauseKind.LOSS),
        (GONE, CauseKind.LOSS),
        (None, CauseKind.LOSS),
        (replace(GONE, exit_code=1), None),
        (pod(1).succeeded().get(), None),
        (pod(1).get(), None),
    ],
    ids=["deleted", "cut off", "deleted where it is cut off", "killed", "removed at once",
         "gave up with its job", "succeeded", "still there"],
)  # fmt: skip
def test_pod_that_stops_taking_part_has_a_cause_kind(
    after: Pod | None, kind: CauseKind | None
) -> None:
    stays = pod(0).get()
    two = PodHistory().seen(running(2), round_of(3, *running(2)))
    left = two.seen([stays, after] if after else [stays], round_of(3, stays))
    assert [one.kind for one in left.departures.values()] == ([kind] if kind else [])
    assert all((one.pod, one.round) == ("job-1", 3) for one in left.departures.values())


def test_pod_that_never_took_part_is_not_missed() -> None:
    waiting = pod(2).pending().get()
    seen = PodHistory().seen([*running(2), waiting], round_of(1, *running(2)))
    assert not seen.seen(running(2), round_of(1, *running(2))).departures


def test_late_pod_end_is_assigned_to_its_round() -> None:
    """A node is known to be cut off long after the others have formed a round without it."""
    stays = pod(0).get()
    pod_history = PodHistory().seen(running(2), round_of(3, *running(2)))
    pod_history = pod_history.seen(running(2), round_of(4, stays))
    cut = [stays, pod(1).on(NodeState.NOT_READY).get()]
    pod_history = pod_history.seen(cut, round_of(5, stays))
    assert [one.round for one in pod_history.departures.values()] == [3]


def test_cause_of_next_round_is_the_pod_that_left() -> None:
    gone = (Departure("job-10", 3, CauseKind.LEAVE), Departure("job-9", 3, CauseKind.LEAVE))
    told = with_causes(round_of(4, *running(2)), RendezvousView(), gone)
    assert told.cause == Cause(CauseKind.LEAVE, ("job-9", "job-10"))
    assert [(one.cause.kind, one.cause.members) for one in told.rounds] == [
        ("start", ()), ("join", ()), ("join", ()), ("leave", ("job-9", "job-10")),
    ]  # fmt: skip
    lost = with_causes(
        round_of(4, *running(2)), RendezvousView(), (*gone, Departure("job-0", 3, CauseKind.LOSS))
    )
    assert lost.cause is not None
    assert lost.cause.kind == "loss"


def test_certain_cause_of_agents_is_kept() -> None:
    gone = (Departure("job-1", 3, CauseKind.LOSS),)
    known = round_of(4, *running(2), cause="masterPort")
    assert with_causes(known, RendezvousView(), gone) == known


def test_shown_cause_survives_operator_restart() -> None:
    fresh = round_of(4, *running(2))
    told = with_causes(fresh, RendezvousView(), (Departure("job-1", 3, CauseKind.LOSS),))
    assert with_causes(fresh, told, ()) == told
    forming = replace(fresh, state=RendezvousState.JOINABLE, round=5)
    again = with_causes(forming, told, ())
    assert again.cause == Cause(CauseKind.JOIN), "that was another round's"


def test_only_recent_rounds_are_kept() -> None:
    old = PodHistory(departures={"a": Departure("job-1", 3, CauseKind.LEAVE)})
    assert old.seen((), round_of(13)).departures
    assert not old.seen((), round_of(14)).departures


def test_aborted_collective_is_no_failure_if_a_pod_left() -> None:
    view = round_of(4, pod(0).get(), cause="failure")
    aborted = Cause(CauseKind.FAILURE, ("job-0",), "aborted")
    named = tuple(replace(each, cause=aborted) for each in view.rounds)
    view = replace(view, rounds=named, cause=aborted)
    gone = [Departure("job-1", 3, CauseKind.LEAVE)]
    better = with_causes(view, RendezvousView(), gone)
    assert better.cause == Cause(CauseKind.LEAVE, ("job-1",))
    assert (better.rounds[-1].cause.kind, better.rounds[-1].cause.members) == ("leave", ("job-1",))
    own = [Departure("job-0", 3, CauseKind.LEAVE)]
    assert with_causes(view, RendezvousView(), own) == view, "its own worker failed before it went"
