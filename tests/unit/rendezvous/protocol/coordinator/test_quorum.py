"""Members eligible for a freeze, and the freeze rule as a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.coordinator.quorum import (
    Freeze,
    Quorum,
    Wait,
    choose,
    group_members,
)
from elasticjob_rendezvous.protocol.records.members import MemberState
from elasticjob_rendezvous.protocol.records.params import DrainRequest
from elasticjob_rendezvous.protocol.records.params import RendezvousParams as Params
from tests.unit.rendezvous.builders import Job, a_member, identity

WAITING, RUNNING, STOPPING, LEAVING, DONE = MemberState


@dataclass(frozen=True)
class Case:
    """Case of the freeze rule, with members named by letters; capitals are survivors that wait."""

    waiting: str
    bounds: Params
    frozen: str | None
    previous: int = 0
    absent: str = ""  # survivors that are present and do not wait
    last_call_over: bool = False
    last_call: bool = field(default=True)


CASES = {
    "nobody": Case("", Params(1, 4), None, last_call=False),
    "fewer than the minimum": Case("a", Params(2, 4), None, last_call=False),
    "fewer than the minimum, last call over": Case(
        "a", Params(2, 4), None, last_call_over=True, last_call=False
    ),
    "all of a fixed size": Case("abc", Params(3, 3), "abc"),
    "the first round waits out its last call": Case("ab", Params(1, 4), None),
    "the last call is over": Case("ab", Params(1, 4), "ab", last_call_over=True),
    "everybody who can come": Case("ab", Params(1, 4, expected=2), "ab"),
    "one who can come is missing": Case("ab", Params(1, 4, expected=3), None),
    "more than can come": Case("abc", Params(1, 4, expected=2), "abc"),
    "more than the maximum": Case("abcdef", Params(1, 4), "abcd"),
    "off the grid of sizes": Case("abcde", Params(1, 9, 3, expected=5), "abcd"),
    "on the grid of sizes": Case("abcdefg", Params(1, 9, 3, expected=7), "abcdefg"),
    "survivors come first": Case("abCD", Params(1, 3, expected=4), "CDa", previous=1),
    "a recovery waits for nobody else": Case("AB", Params(1, 4), "AB", previous=1),
    "a recovery takes newcomers that are there": Case("aB", Params(1, 4), "Ba", previous=1),
    "a recovery waits for its survivors": Case("A", Params(1, 4), None, previous=1, absent="B"),
    "survivors wait at most for the last call": Case(
        "A", Params(1, 4), "A", previous=1, absent="B", last_call_over=True
    ),
    "too few survivors are no recovery": Case("abC", Params(2, 4), None, previous=1),
    "no survivor is no recovery": Case("ab", Params(1, 4), None, previous=3),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_freeze_rule(case: Case) -> None:
    waiting = tuple(a_member(letter) for letter in case.waiting)
    here = {identity(letter) for letter in case.waiting if letter.isupper()}
    survivors = frozenset(here | {identity(letter) for letter in case.absent})
    quorum = Quorum(waiting, (), survivors, survivors | {member.id for member in waiting})
    choice = choose(quorum, case.bounds, case.previous, case.last_call_over)
    if case.frozen is None:
        assert isinstance(choice, Wait)
        assert choice.last_call is case.last_call
        assert str(len(case.waiting)) in choice.reason
    else:
        assert choice == Freeze(tuple(identity(letter) for letter in case.frozen))


# -- classification -------------------------------------------------------------------


def quorum(job: Job, previous: int = 0, silenced: set[str] | None = None) -> Quorum:
    view = job.view()
    assert view.bounds is not None
    roster = view.rosters.get(previous)
    return group_members(view.members(), previous, roster, view.bounds.record, silenced or set())


def names(members: tuple[Any, ...]) -> list[str]:
    return [member.name for member in members]


def test_frozen_members_are_in_rank_order() -> None:
    choice = choose(quorum(Job("w-10", "w-9", "w-1")), Params(1, 3), 0, last_call_over=False)
    assert choice == Freeze((identity("w-1"), identity("w-9"), identity("w-10")))


@pytest.mark.parametrize(
    ("state", "round", "waits", "unstopped", "survives"),
    [
        (WAITING, 3, True, False, True),
        (RUNNING, 3, False, True, True),
        (STOPPING, 3, False, True, True),
        (LEAVING, 3, False, True, False),
        (DONE, 3, False, False, True),
    ],
)
def test_counting_of_a_member_with_rank_assignment(
    state: MemberState, round: int, waits: bool, unstopped: bool, survives: bool
) -> None:
    job = Job("a", "b").sealed("a", "b", number=3).change("a", state=state, round=round)
    count = quorum(job, previous=3)
    assert ("a" in names(count.waiting)) is waits
    assert ("a" in names(count.unstopped)) is unstopped
    assert (identity("a") in count.survivors) is survives


def test_leaving_member_that_reported_stop_is_not_counted() -> None:
    job = Job("a", "b").sealed("a", "b", number=3).change("a", state=LEAVING, stopped=True)
    count = quorum(job, previous=3)
    assert names(count.unstopped) == ["b"]
    assert not count.waiting
    assert identity("a") not in count.survivors | count.live


def test_member_with_rank_assignment_that_may_still_start_counts_as_running() -> None:
    job = Job("a").sealed("a", number=3).change("a", state=WAITING, round=2)
    assert names(quorum(job, previous=3).unstopped) == ["a"]


def test_newcomer_without_earlier_round_is_counted() -> None:
    job = Job("a", "b").sealed("a", number=3)
    count = quorum(job, previous=3)
    assert names(count.waiting) == ["b"]
    assert count.survivors == {identity("a")}
    assert count.live == {identity("a"), identity("b")}


def test_member_with_drain_request_is_neither_included_nor_a_survivor() -> None:
    mark = DrainRequest(identity("a"), "scaled down")
    job = Job("a", "b", marks=(mark,)).sealed("a", "b", number=1)
    job.change("a", state=WAITING).change("b", state=WAITING)
    count = quorum(job, previous=1)
    assert names(count.waiting) == ["b"]
    assert count.survivors == count.live == {identity("b")}
    assert count.unstopped == ()


def test_running_member_with_drain_request_is_waited_for() -> None:
    mark = DrainRequest(identity("a"), "scaled down")
    job = Job("a", "b", marks=(mark,)).sealed("a", "b", number=1)
    assert names(quorum(job, previous=1).unstopped) == ["a", "b"]


def test_member_excluded_for_silence_is_not_included() -> None:
    count = quorum(Job("a", "b"), silenced={identity("a")})
    assert names(count.waiting) == ["b"]
    assert count.unstopped == ()


def test_member_with_other_sizes_is_not_included() -> None:
    job = Job("a", "b", "c", min_nodes=1, max_nodes=4)
    job.change("a", sizes="2:4:1").change("b", sizes="1:4:1")
    assert names(quorum(job).waiting) == ["b", "c"]


@pytest.mark.parametrize(("most", "frozen"), [(3, "abc"), (2, "bc"), (1, "b")])
def test_newcomers_make_way_for_survivors_only_if_places_are_short(most: int, frozen: str) -> None:
    waiting = tuple(a_member(name) for name in "cab")
    survivors = frozenset({identity("b"), identity("c")})
    quorum = Quorum(waiting, (), survivors, survivors | {identity("a")})
    choice = choose(quorum, Params(1, most), 1, last_call_over=True)
    assert choice == Freeze(tuple(identity(name) for name in frozen))
