"""Placement and order of replicas: properties over random gangs, and tables."""

from __future__ import annotations

import collections
import itertools
import random

import pytest

from elasticjob.train.snapshots.core.agreement import (
    REPLICAS,
    SHARED,
    STORAGE,
    Offer,
    Part,
    Version,
    decide,
)
from elasticjob.train.snapshots.core.replicas import (
    Accepted,
    Generations,
    Member,
    State,
    copies_at,
    holders,
    is_stale,
    kept,
    may_drop,
    receivers,
    replica_to_overwrite,
    step_to_overwrite,
)
from elasticjob.train.snapshots.ranks.replication import domains


def test_topology_domains_replace_machines_where_every_rank_has_one() -> None:
    places = [
        ("host-1", "rack-a"),
        ("host-2", "rack-a"),
        ("host-3", "rack-b"),
        ("host-4", "rack-b"),
    ]
    assert domains(places) == ["rack-a", "rack-a", "rack-b", "rack-b"]
    members = [Member(rank, f"n{rank}", place) for rank, place in enumerate(domains(places))]
    to = holders(members, 1)
    rack = {f"n{rank}": place for rank, place in enumerate(domains(places))}
    assert all(rack[node] != rack[other] for node, [other] in to.items())
    machines = [machine for machine, _ in places]
    assert domains([(machine, "rack-a") for machine in machines]) == machines
    assert domains([*places[:3], ("host-4", "")]) == machines


def test_reshardable_version_of_another_number_of_ranks_is_restored() -> None:
    version = Version(3, 9)
    parts = [Part(version, rank, 3, 2, True) for rank in (SHARED, 0, 1, 2)]
    first = Offer(memory=(parts[0], parts[1]), replicas=(parts[3],))
    second = Offer(memory=(parts[0], parts[2]))
    plan = decide([first, second], True)
    assert plan is not None
    assert [(source.part.rank, source.readers) for source in plan.own] == [
        (0, (0,)), (1, (1,)), (2, (0,)),
    ]  # fmt: skip
    rigid = [Offer(*(tuple(p._replace(reshards=False) for p in at) for at in offer)) for offer in
             (first, second)]  # fmt: skip
    assert decide(rigid, True) is None
    assert decide([first._replace(replicas=()), second], True) is None


def test_copies_of_a_reshardable_version_stay_at_another_number_of_ranks() -> None:
    version = Version(3, 9)
    parts = tuple(Part(version, rank, 3, 2, True) for rank in (SHARED, 0, 1, 2))
    members = [Member(rank, f"n{rank}", f"host-{rank}") for rank in range(2)]
    offers = [Offer(replicas=(parts[0], parts[1], parts[3])), Offer(replicas=(parts[0], parts[2]))]
    assert kept(offers, members, None, True) == version
    rigid = [
        Offer(replicas=tuple(p._replace(reshards=False) for p in each.replicas)) for each in offers
    ]
    assert kept(rigid, members, None, True) is None


def gang(*domains: int, local_ranks: int = 1) -> list[Member]:
    """Return the members of nodes of which the first `domains[0]` are in one domain, and so on."""
    names = [f"machine{number}" for number, nodes in enumerate(domains) for _ in range(nodes)]
    return [
        Member(node * local_ranks + local, f"node{node}", domain)
        for node, domain in enumerate(names)
        for local in range(local_ranks)
    ]


def gangs() -> list[list[Member]]:
    drawn = random.Random(20)
    found = []
    for _ in range(150):
        members = gang(
            *(drawn.randint(1, 5) for _ in range(drawn.randint(1, 6))),
            local_ranks=drawn.randint(1, 3),
        )
        # Ranks are spread over the nodes in any order.
        ranks = list(range(len(members)))
        drawn.shuffle(ranks)
        found.append([m._replace(rank=rank) for m, rank in zip(members, ranks, strict=True)])
    return found


@pytest.mark.parametrize("replicas", [0, 1, 2, 3])
def test_each_node_sends_and_holds_the_same_number_of_copies_elsewhere(replicas: int) -> None:
    for members in gangs():
        to = holders(members, replicas)
        expected = min(replicas, len(to) - 1)
        assert set(to) == {member.node for member in members}
        for node, nodes in to.items():
            assert node not in nodes
            assert len(set(nodes)) == len(nodes) == expected
        received = collections.Counter(itertools.chain(*to.values()))
        assert set(received.values()) <= {expected}


def test_copies_are_in_another_domain_unless_one_has_more_than_half_of_the_nodes() -> None:
    for members in gangs():
        domains = {member.node: member.domain for member in members}
        sizes = collections.Counter(domains.values())
        to = holders(members, 1)
        inside = (
            sum(domains[node] == domains[held] for node, (held, *_) in to.items() if len(to) > 1)
            if len(to) > 1
            else 0
        )
        others = len(domains) - max(sizes.values())
        unavoidable = max(0, max(sizes.values()) - others) if len(domains) > 1 else 0
        assert inside == unavoidable, sizes


def test_second_copy_is_in_a_third_domain_where_there_is_one() -> None:
    members = gang(2, 2, 2)
    domains = {member.node: member.domain for member in members}
    for node, nodes in holders(members, 2).items():
        assert len({domains[each] for each in (node, *nodes)}) == 3


def test_placement_does_not_depend_on_the_order_of_the_members() -> None:
    for members in gangs():
        shuffled = random.Random(3).sample(members, len(members))
        assert receivers(members, 2) == receivers(shuffled, 2)


def test_each_rank_sends_to_one_rank_on_each_holding_node() -> None:
    for members in gangs():
        node_of = {member.rank: member.node for member in members}
        to = holders(members, 2)
        for rank, ranks in receivers(members, 2).items():
            assert tuple(node_of[each] for each in ranks) == to[node_of[rank]]


def test_copies_at_the_nodes_are_those_that_are_sent() -> None:
    for members in gangs():
        node_of = {member.rank: member.node for member in members}
        sent = collections.defaultdict(set)
        for rank, ranks in receivers(members, 2).items():
            for each in ranks:
                sent[node_of[each]].add(rank)
        for node in set(node_of.values()):
            own = {rank for rank, at in node_of.items() if at == node}
            assert copies_at(members, 2, node, False) == sent[node]
            assert copies_at(members, 2, node, True) == sent[node] | own | {SHARED}


def test_placement_of_the_changed_gang_contains_its_nodes_alone() -> None:
    members = gang(2, 2, 1)
    for lost in {member.node for member in members}:
        left = [member for member in members if member.node != lost]
        assert lost not in set(itertools.chain(*holders(left, 2).values()))


V1, V2, V3 = Version(1, 7), Version(2, 7), Version(3, 7)
DONE, RUNNING, FAILED = State.DONE, State.RUNNING, State.FAILED


@pytest.mark.parametrize(
    ("states", "begins", "confirmed"),
    [
        ([DONE, DONE], True, V2),
        ([DONE, RUNNING], False, V1),
        ([DONE, FAILED], True, V1),
        ([FAILED, RUNNING], False, V1),
        ([FAILED, FAILED], True, V1),
    ],
)
def test_generation_is_confirmed_when_all_ranks_have_copied_it(
    states: list[State], begins: bool, confirmed: Version
) -> None:
    generations = Generations(V1)
    generations.begin(V2)
    assert generations.exchanged(states) is begins
    assert generations.confirmed == confirmed
    assert (generations.running is None) is begins


def test_states_without_a_generation_confirm_nothing() -> None:
    generations = Generations()
    assert generations.exchanged([State.IDLE, State.IDLE])
    assert generations.confirmed is None


def copy(version: Version, rank: int = 0) -> Part:
    return Part(version, rank, 2, version.step - 1)


@pytest.mark.parametrize(
    ("held", "keep", "expected"),
    [
        ([None, None], None, 0),
        ([copy(V1), None], V1, 1),
        ([copy(V1), copy(V2)], V1, 1),
        ([copy(V1), copy(V2)], V2, 0),
        ([copy(V1), copy(V2)], V3, 0),
        ([copy(V1), copy(V1)], V1, 0),
    ],
)
def test_confirmed_copy_is_not_overwritten(
    held: list[Part | None], keep: Version | None, expected: int
) -> None:
    assert replica_to_overwrite(held, keep) == expected


@pytest.mark.parametrize("order", [1, -1])
def test_copy_of_a_renamed_step_stays_longer_than_that_of_its_former_name(order: int) -> None:
    """The ranks have given up the snapshot of step 8, and then name one before it."""
    own = Part(Version(9, 7), 1, 2, 8)
    renamed = own._replace(before=6)
    held = [own, renamed][::order]
    index = step_to_overwrite(held, own._replace(version=Version(10, 7), before=6))
    assert index is not None
    assert held[index] == own


def test_delayed_copy_is_not_accepted_after_a_newer_one_of_the_same_rank() -> None:
    accepted = Accepted()
    assert accepted.accepts(copy(V2))
    assert accepted.accepts(copy(V2))
    assert not accepted.accepts(copy(V1))
    assert accepted.accepts(copy(V1, rank=1))


def test_copies_of_other_ranks_are_dropped_once_a_generation_is_confirmed() -> None:
    generations = Generations(V1)
    assert not may_drop(copy(V1), frozenset({1}), generations)
    generations.begin(V2)
    generations.exchanged([DONE, DONE])
    assert may_drop(copy(V1), frozenset({1}), generations)
    assert not may_drop(copy(V1, rank=1), frozenset({1}), generations)


@pytest.mark.parametrize(
    ("version", "ranks", "is_sharded", "stale"),
    [
        (V1, 2, True, True),
        (V2, 2, True, False),
        (V3, 3, True, False),
        (V1, 2, False, False),  # this gang may still go back to it
        (V1, 3, False, True),
        (V2, 3, False, False),
    ],
)
def test_copies_that_the_gang_cannot_restore_are_stale(
    version: Version, ranks: int, is_sharded: bool, stale: bool
) -> None:
    assert is_stale(copy(version), (V2, V3), ranks, is_sharded) is stale


def whole(version: Version, *ranks: int) -> tuple[Part, ...]:
    return tuple(copy(version, rank) for rank in (SHARED, *ranks))


def test_sharded_state_goes_back_to_the_newest_version_with_all_parts() -> None:
    offers = [
        Offer(memory=whole(V3, 0), replicas=whole(V1, 0, 1)),
        Offer(storage=whole(Version(0, 7), 0, 1)),
    ]
    plan = decide(offers, True)
    assert plan is not None
    assert (plan.version, plan.shared.place) == (V1, REPLICAS)
    # State that the ranks share is not given up for their own.
    plan = decide(offers)
    assert plan is not None
    assert (plan.version, plan.own) == (V3, ())
    plan = decide([Offer(memory=whole(V3, 0)), offers[1]], True)
    assert plan is not None
    assert plan.shared.place == STORAGE
    assert decide([Offer(memory=whole(V3, 0)), Offer()], True) is None


def test_copy_replaces_the_part_of_a_lost_node() -> None:
    plan = decide([Offer(memory=whole(V3, 0), replicas=(copy(V3, 1),)), Offer()])
    assert plan is not None
    assert [(source.place, source.readers) for source in plan.own] == [
        ("memory", (0,)),
        ("replicas", (0,)),
    ]


def test_copies_of_the_version_before_a_stop_are_kept_until_there_are_newer_ones() -> None:
    """A node may be lost before the copies of the restored version are on another one."""

    def own(version: Version, rank: int) -> Part:
        return Part(version, rank, 2, 0)

    shared = {version: Part(version, SHARED, 2, 0) for version in (V1, V2, V3)}
    at_stop = shared[V3]._replace(at_stop=True)
    offers = [
        Offer(
            memory=(shared[V2], at_stop, own(V2, rank), at_stop._replace(rank=rank)),
            replicas=(own(V1, 1 - rank), own(V2, 1 - rank)),
        )
        for rank in (0, 1)
    ]
    plan = decide(offers)
    assert plan is not None
    assert (plan.version, len(plan.own)) == (V3, 2)
    assert kept(offers, gang(1, 1), plan, False) == V2
    copied = [
        each._replace(replicas=(*each.replicas, at_stop._replace(rank=1 - rank)))
        for rank, each in enumerate(offers)
    ]
    assert kept(copied, gang(1, 1), plan, False) == V3
    partly = [copied[0], offers[1]]
    assert kept(partly, gang(1, 1), plan, False) == V2
    alone = [each._replace(replicas=()) for each in offers]
    assert kept(alone, gang(1, 1), plan, False) == V3


def test_version_that_survives_the_most_losses_is_kept_for_sharded_state() -> None:
    members = gang(1, 1)
    offers = [
        Offer(memory=whole(V3, 0), replicas=(*whole(V1, 0, 1), *whole(V2, 0, 1))),
        Offer(memory=whole(V3, 1), replicas=(*whole(V1, 0, 1), *whole(V2, 0))),
    ]
    plan = decide(offers, True)
    assert plan is not None
    assert plan.version == V3
    assert kept(offers, members, plan, True) == V1
    assert kept(offers[:1] * 2, members[:1] * 2, plan, True) == V2
    assert kept(offers, members, plan, False) == V3
    assert kept([Offer()], members[:1], None, False) is None
    assert kept([Offer(replicas=whole(V1, 0))] * 2, members, plan, True) is None
