"""Sizes and rank assignment."""

from __future__ import annotations

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob_rendezvous.protocol.records.members import Member
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import by_name, legal_size, natural_order, seal
from tests.unit.rendezvous.builders import a_member


@pytest.mark.parametrize(
    ("minimum", "maximum", "increment", "available", "size"),
    [
        (1, 4, 1, 0, 0),
        (1, 4, 1, 1, 1),
        (1, 4, 1, 3, 3),
        (1, 4, 1, 9, 4),
        (2, 8, 2, 1, 0),
        (2, 8, 2, 3, 2),
        (2, 8, 2, 8, 8),
        (2, 7, 2, 9, 6),
        (3, 8, 4, 6, 3),
        (3, 8, 4, 7, 7),
        (5, 5, 1, 4, 0),
        (5, 5, 1, 5, 5),
    ],
)
def test_legal_sizes(minimum: int, maximum: int, increment: int, available: int, size: int) -> None:
    assert legal_size(RendezvousParams(minimum, maximum, increment), available) == size


@given(st.integers(1, 50), st.integers(0, 50), st.integers(1, 20), st.integers(0, 120))
def test_legal_size_is_the_largest_on_the_grid(
    minimum: int, more: int, increment: int, available: int
) -> None:
    bounds = RendezvousParams(minimum, minimum + more, increment)
    grid = range(minimum, bounds.max_nodes + 1, increment)
    assert legal_size(bounds, available) == max((s for s in grid if s <= available), default=0)


@pytest.mark.parametrize(
    "ordered",
    [
        ["pod-2", "pod-10"],
        ["pod", "pod-0"],
        ["a-9", "b-1"],
        ["job-2-worker-9", "job-2-worker-11", "job-10-worker-0"],
        ["7", "8x", "10", "a"],
        ["gpu-a100-3", "gpu-a100-20", "gpu-h100-1"],
    ],
)
def test_natural_order(ordered: list[str]) -> None:
    shuffled = [*ordered[1:], ordered[0]]
    assert sorted(shuffled, key=natural_order) == ordered


names = st.text(string.ascii_lowercase + string.digits + "-", min_size=1, max_size=8)


@given(st.lists(names, max_size=6))
def test_names_of_any_form_can_be_ordered(some: list[str]) -> None:
    ordered = sorted(some, key=natural_order)
    assert sorted(ordered, key=natural_order) == ordered


def test_equal_names_are_ordered_by_id() -> None:
    twins = [a_member("a", id="2"), a_member("a", id="1")]
    assert [member.id for member in by_name(twins)] == ["1", "2"]


members = st.lists(
    st.builds(
        lambda name, slots, role: a_member(name, slots=slots, role=role),
        names, st.integers(1, 5), st.sampled_from(["trainer", "reader"]),
    ),
    min_size=1, max_size=12, unique_by=lambda member: member.id,
)  # fmt: skip


@given(members, st.randoms())
def test_ranks_are_a_bijection_independent_of_arrival(gang: list[Member], random: Any) -> None:
    roster = seal(7, gang, restarts=2)
    assert (roster.number, roster.restarts) == (7, 2)
    assert roster.world_size == sum(member.slots for member in gang)
    assert {assignment.id for assignment in roster.seats} == {member.id for member in gang}
    ranks = [
        assignment.base_rank + local
        for assignment in roster.seats
        for local in range(assignment.slots)
    ]
    assert ranks == list(range(roster.world_size))
    assert [assignment.group_rank for assignment in roster.seats] == list(range(len(gang)))
    random.shuffle(gang)
    assert seal(7, gang, restarts=2) == roster


@given(members)
def test_role_ranks_are_a_bijection_within_each_role(gang: list[Member]) -> None:
    roster = seal(1, gang, restarts=0)
    for role in {assignment.role for assignment in roster.seats}:
        seats = [assignment for assignment in roster.seats if assignment.role == role]
        ranks = [
            assignment.role_base_rank + local
            for assignment in seats
            for local in range(assignment.slots)
        ]
        size = sum(assignment.slots for assignment in seats)
        assert ranks == list(range(size))
        assert {assignment.role_world_size for assignment in seats} == {size}


def test_first_member_in_order_is_the_master() -> None:
    gang = [a_member("w-10", master_port=1), a_member("w-9", address="10.0.0.9", master_port=2)]
    roster = seal(1, gang, restarts=0)
    assert (roster.master_address, roster.master_port) == ("10.0.0.9", 2)
    assert [assignment.name for assignment in roster.seats] == ["w-9", "w-10"]


@pytest.mark.parametrize(
    ("slots", "served", "used"),
    [
        ((1, 1), (True, True), True),
        ((2,), (True,), True),
        ((1, 1), (True, False), False),
        # Its program may start processes that meet at an address of their own.
        ((1,), (True,), False),
    ],
)
def test_served_store_is_used_by_several_workers_whose_nodes_all_have_one(
    slots: tuple[int, ...], served: tuple[bool, ...], used: bool
) -> None:
    gang = [
        a_member(f"w-{index}", slots=count, master_served=serves)
        for index, (count, serves) in enumerate(zip(slots, served, strict=True))
    ]
    assert seal(1, gang, restarts=0).master_served is used


def test_heterogeneous_slots_and_roles() -> None:
    gang = [
        a_member("a", slots=2, role="trainer", node="n1"),
        a_member("b", slots=1, role="reader"),
        a_member("c", slots=4, role="trainer"),
    ]
    roster = seal(1, gang, restarts=0)
    places = [(s.base_rank, s.role_base_rank, s.role_world_size) for s in roster.seats]
    assert places == [(0, 0, 6), (2, 0, 1), (3, 2, 6)]
    assert (roster.world_size, roster.seats[0].node) == (7, "n1")


def test_rank_assignment_has_the_probe_addresses_of_its_member() -> None:
    """A later coordinator may have to probe it after its key is gone."""
    member = a_member("a", session="s7", agent_port=7100, launcher_port=7200)
    (assignment,) = seal(3, [member], 0).seats
    assert (assignment.session, assignment.address) == ("s7", "host-a")
    assert (assignment.agent_port, assignment.launcher_port) == (7100, 7200)


@pytest.mark.parametrize(("ceiling", "most"), [(0, 0), (1, 5), (2, 6), (4, 12)])
def test_maximum_world_size_counts_the_most_slots_of_a_node(ceiling: int, most: int) -> None:
    members = [a_member("a", slots=3), a_member("b", slots=2)]
    assert seal(1, members, 0, ceiling).max_world_size == most
    assert seal(1, members, 0).max_world_size == 0
