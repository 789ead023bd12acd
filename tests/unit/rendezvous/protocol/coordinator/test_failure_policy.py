"""Message and cost of a failure."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.protocol.coordinator.failure_policy import (
    KEPT_FAILURES,
    blamed,
    culprit,
    describe,
    failures_text,
    includes_cause,
    is_budget_spent,
    is_redundant,
    port_taken,
    surplus,
    window_seconds,
)
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.members import Done
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.unit.rendezvous.builders import a_failure, identity

USER, OOM, ABORT, SIGNAL, LAUNCH, PORT, LATE, HANG = (
    FailureClass.USER_ERROR,
    FailureClass.HOST_OUT_OF_MEMORY,
    FailureClass.PEER_ABORT,
    FailureClass.SIGNAL,
    FailureClass.LAUNCH_ERROR,
    FailureClass.MASTER_PORT,
    FailureClass.COLLECTIVE_TIMEOUT,
    FailureClass.HANG,
)


def failures(*kinds: FailureClass) -> list[Failure]:
    return [a_failure(f"m{index}", kind=kind) for index, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("kinds", "speaks", "taken"),
    [
        ((), False, False),
        ((ABORT,), False, False),
        ((LATE, ABORT), False, False),
        ((PORT, LATE), False, True),
        ((LATE, SIGNAL), True, False),
        ((PORT,), False, True),
        ((PORT, ABORT, ABORT), False, True),
        ((USER,), True, False),
        ((OOM,), True, False),
        ((SIGNAL,), True, False),
        ((LAUNCH,), True, False),
        ((ABORT, USER), True, False),
        ((PORT, USER), True, False),
        ((PORT, LATE, ABORT), False, True),
    ],
)
def test_causes_and_consequences(
    kinds: tuple[FailureClass, ...], speaks: bool, taken: bool
) -> None:
    assert includes_cause(failures(*kinds)) is speaks
    assert port_taken(failures(*kinds)) is taken


def test_earliest_cause_precedes_earlier_consequences_as_first_failure() -> None:
    early = a_failure("a", kind=ABORT, at_ms=10)
    cause = a_failure("b", kind=USER, at_ms=30)
    later = a_failure("c", kind=OOM, at_ms=40)
    assert culprit([later, early, cause]) is cause
    assert culprit([early]) is early
    assert culprit([]) is None


def test_among_consequences_the_nearest_to_the_cause_is_the_first_failure() -> None:
    aborted = a_failure("a", kind=ABORT, at_ms=10)
    late = a_failure("b", kind=LATE, at_ms=20)
    port = a_failure("c", kind=PORT, at_ms=30)
    assert culprit([aborted, late]) is late
    assert culprit([aborted, late, port]) is port


def test_first_failure_of_the_outcome_stays_despite_later_reports() -> None:
    first, earlier = a_failure("a", at_ms=20), a_failure("b", at_ms=10)
    assert blamed([first, earlier], "id-a") is first
    assert blamed([first, earlier], "") is earlier
    assert blamed([earlier], "id-a") is earlier
    assert blamed([], "id-a") is None


def test_taken_port_is_further_from_the_cause_than_an_error() -> None:
    port, error = a_failure("a", kind=PORT, at_ms=1), a_failure("b", at_ms=2)
    assert culprit([port, error]) == error
    assert culprit([error, port]) == error


def test_among_simultaneous_failures_the_lowest_rank_is_first() -> None:
    twins = [a_failure("a", rank=3, at_ms=10), a_failure("b", rank=2, at_ms=10)]
    assert culprit(twins) is twins[1]


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (a_failure("a", rank=2, exit_code=3), "rank 2 on a ended with exit code 3"),
        (
            a_failure("a", exit_code=None, signal=9, message=" killed\nmore"),
            "rank 0 on a ended with signal 9: killed",
        ),
        (a_failure("a", message="x" * 500), f"rank 0 on a ended with exit code 1: {'x' * 159}…"),
        (
            a_failure("a", message="E: in loading:\n\tMissing: x\n\tmore"),
            "rank 0 on a ended with exit code 1: E: in loading: Missing: x",
        ),
        (a_failure("a", exit_code=3, message="exit code 3"), "rank 0 on a ended with exit code 3"),
        (
            a_failure("a", message="exit code 1; the last line on its standard error: no data"),
            "rank 0 on a ended with exit code 1: the last line on its standard error: no data",
        ),
        (
            a_failure("a", exit_code=139, message="exit code 139: a command in it was killed"),
            "rank 0 on a ended with exit code 139: a command in it was killed",
        ),
        (
            a_failure("a", kind=HANG, exit_code=None, signal=6, message="no progress for 4 s"),
            "rank 0 on a hung: no progress for 4 s",
        ),
        (a_failure("a", message=" \n "), "rank 0 on a ended with exit code 1"),
        (
            a_failure("a", rank=-1, local_rank=2, exit_code=None, message="no such file"),
            "local rank 2 on a failed: no such file",
        ),
        (
            a_failure("a", message="exit code 1;: X11 is missing"),
            "rank 0 on a ended with exit code 1: X11 is missing",
        ),
        (
            a_failure("a", message="exit code 1 is not 0", describes_exit=False),
            "rank 0 on a ended with exit code 1: exit code 1 is not 0",
        ),
        (
            a_failure("a", message="exit code 1; the last line: no data", describes_exit=True),
            "rank 0 on a ended with exit code 1; the last line: no data",
        ),
        (a_failure("a", describes_exit=True), "rank 0 on a ended with exit code 1"),
    ],
)
def test_describe_a_failure(failure: Failure, line: str) -> None:
    assert describe(failure) == line


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        ((), ""),
        (("m2",), "; by then m2 had ended with success"),
        (("m10", "m2"), "; by then m2 and 1 more had ended with success"),
        (("m10", "m9", "m2"), "; by then m2 and 2 more had ended with success"),
    ],
)
def test_aborted_collective_names_the_done_members(ended: tuple[str, ...], said: str) -> None:
    done = [Done(1, identity(name), name) for name in ended]
    abort, error = a_failure("a", kind=ABORT), a_failure("b")
    assert failures_text([abort], done) == f"rank 0 on a ended with exit code 1{said}"
    assert failures_text([abort, error], done) == "rank 0 on b ended with exit code 1"


def test_round_without_failure_records_is_described_as_failed_worker() -> None:
    assert failures_text([]) == "a worker failed"


@pytest.mark.parametrize(
    ("charged", "most", "over"), [((), 0, False), ((1,), 0, True), ((1, 2, 5), 3, False),
                                  ((1, 2, 5, 6), 3, True)],
)  # fmt: skip
def test_restart_budget(charged: tuple[int, ...], most: int, over: bool) -> None:
    assert is_budget_spent(charged, RendezvousParams(1, 1, max_restarts=most)) is over


def test_charging_window_exceeds_the_lease() -> None:
    assert window_seconds(RendezvousParams(1, 1, keep_alive_seconds=7)) == 8.0


# -- retention ------------------------------------------------------------------------


def test_sixteen_failures_nearest_to_the_cause_are_kept() -> None:
    reported = failures(*[ABORT] * 30, LATE, USER, *[ABORT] * 5)
    by_member = {failure.member: failure for failure in reported}
    gone = surplus(by_member)
    kept = [by_member[member] for member in by_member if member not in gone]
    assert len(kept) == KEPT_FAILURES
    assert culprit(kept) == culprit(reported)
    assert {USER, LATE} <= {failure.kind for failure in kept}
    assert surplus({failure.member: failure for failure in kept}) == []


@pytest.mark.parametrize(
    ("mine", "known", "nothing"),
    [
        (ABORT, [ABORT] * KEPT_FAILURES, True),
        (ABORT, [ABORT] * (KEPT_FAILURES - 1), False),
        (ABORT, [USER, *[ABORT] * (KEPT_FAILURES - 1)], True),
        (LATE, [ABORT] * 100, False),
        (USER, [LATE] * 100, False),
        (USER, [SIGNAL] * KEPT_FAILURES, True),
        (USER, [FailureClass.MASTER_PORT] * KEPT_FAILURES, False),
        (FailureClass.MASTER_PORT, [USER] * KEPT_FAILURES, True),
    ],
)
def test_redundant_failure_adds_nothing(
    mine: FailureClass, known: list[FailureClass], nothing: bool
) -> None:
    assert is_redundant(a_failure("me", kind=mine), failures(*known)) is nothing
