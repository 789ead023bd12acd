"""Answers, from the roster, to the questions that torch's agents ask each other."""

from __future__ import annotations

import json

import pytest

from elasticjob_rendezvous.protocol.records.members import Member
from elasticjob_rendezvous.protocol.records.roster import seal
from elasticjob_rendezvous.torchrun.replies import ALL_FINISHED, Answers, Disagreement


def member(name: str, slots: int, role: str = "trainer") -> Member:
    return Member(name, f"{name}.s", name, "10.0.0.1", 1, slots=slots, role=role)


def answers(*members: Member, own: int = 0) -> Answers:
    roster = seal(7, members, 0)
    return Answers(roster, roster.seats[own])


def test_ranks_match_the_roster_in_total_and_within_a_role() -> None:
    asked = answers(member("n-0", 2), member("n-1", 1, "reader"), member("n-2", 4))
    places = [json.loads(asked.get(f"torchelastic/assigned_ranks/{g}") or b"") for g in range(3)]
    assert places == [[0, 7, 0, 6], [2, 7, 0, 1], [3, 7, 2, 6]]


def test_role_info_has_torch_format() -> None:
    told = answers(member("n-0", 2)).get("torchelastic/role_info/0")
    assert told == b'{"role": "trainer", "rank": 0, "local_world_size": 2}'


@pytest.mark.parametrize(
    "key",
    ["torchelastic/role_info/1", "torchelastic/role_info/", "torchelastic/assigned_ranks/x", "k"],
)
def test_other_keys_have_no_answer_and_may_not_be_set(key: str) -> None:
    asked = answers(member("n-0", 2))
    assert asked.get(key) is None
    assert not asked.check(key, b"")


def test_equal_value_may_be_set_again() -> None:
    asked = answers(member("n-0", 2), member("n-1", 1))
    for key in ("torchelastic/role_info/0", "torchelastic/assigned_ranks/1"):
        assert asked.check(key, asked.get(key) or b"")
    assert asked.check(ALL_FINISHED, b"<val_ignored>")


@pytest.mark.parametrize(("slots", "role"), [(3, "trainer"), (2, "other")])
def test_agent_with_other_workers_gets_the_setting_to_use(slots: int, role: str) -> None:
    said = json.dumps({"role": role, "rank": 0, "local_world_size": slots}).encode()
    with pytest.raises(Disagreement, match=f"slots={slots},role={role}"):
        answers(member("n-0", 2)).check("torchelastic/role_info/0", said)


def test_identical_workers_are_checked_because_torch_skips_the_exchange() -> None:
    answers(member("n-0", 2), member("n-1", 2)).check_identical()
    with pytest.raises(Disagreement, match=r"2 workers of role 'trainer' and n-1 1 worker of"):
        answers(member("n-0", 2), member("n-1", 1)).check_identical()
