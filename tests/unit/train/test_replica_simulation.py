"""Invariants of replicas in simulated gangs, and planted bugs that the simulation finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from elasticjob.train.snapshots.core import agreement, replicas
from elasticjob.train.snapshots.core.agreement import MEMORY, Offer, Part, Plan, Version
from elasticjob.train.snapshots.core.replicas import Accepted, Generations, Member, State
from tests.unit.train.replica_world import Rules, World
from tests.unit.train.simulated import are_broken

SEEDS = 200
WORLDS = [(k, is_sharded) for k in (1, 2) for is_sharded in (True, False)]


@pytest.mark.parametrize(("k", "is_sharded"), WORLDS)
def test_invariants_hold_under_random_crashes_losses_and_delays(k: int, is_sharded: bool) -> None:
    for seed in range(SEEDS):
        World(seed, Rules(), k, is_sharded).run()


@pytest.mark.parametrize("k", [1, 2])
def test_invariants_hold_at_changing_numbers_of_ranks(k: int) -> None:
    sizes = set()
    for seed in range(SEEDS):
        world = World(seed, Rules(), k, is_sharded=True, reshards=True)
        world.run()
        sizes.add(len(world.nodes))
    assert sizes == {2, 3, 4}


@pytest.mark.parametrize(("k", "is_sharded"), WORLDS)
def test_training_without_faults_confirms_new_versions(k: int, is_sharded: bool) -> None:
    world = World(1, Rules(), k, is_sharded)
    world.restore()
    world.train(0, 20_000)
    confirmed = world.ranks[0].generations.confirmed
    assert confirmed is not None
    newest = max(part.version.step for part in world.nodes[0].parts(MEMORY))
    assert newest > 100
    assert newest - confirmed.step <= 25


def fails(rules: Rules) -> bool:
    return are_broken(
        World(seed, rules, k, is_sharded, reshards=reshards).run
        for seed in range(SEEDS)
        for k, is_sharded in WORLDS
        for reshards in ((False, True) if is_sharded else (False,))
    )


class ConfirmsWithOne(Generations):
    def exchanged(self, states: Any) -> bool:
        found = set(states)
        return super().exchanged([State.DONE] if State.DONE in found else found)


class CountsFailures(Generations):
    def exchanged(self, states: Any) -> bool:
        found = [State.DONE if state is State.FAILED else state for state in states]
        return super().exchanged(found)


class ConfirmsWithoutWaiting(Generations):
    def exchanged(self, states: Any) -> bool:
        found = [State.DONE if state is State.RUNNING else state for state in states]
        return super().exchanged(found)


class AcceptsAll(Accepted):
    def accepts(self, part: Part) -> bool:
        return True


def own_node(members: Sequence[Member], k: int) -> dict[int, tuple[int, ...]]:
    return {member.rank: (member.rank,) * k for member in members}


def one_copy_fewer(members: Sequence[Member], k: int) -> dict[int, tuple[int, ...]]:
    return {rank: to[1:] for rank, to in replicas.receivers(members, k).items()}


def same_domain(members: Sequence[Member], k: int) -> dict[int, tuple[int, ...]]:
    flat = [member._replace(domain="") for member in members]
    return replicas.receivers(flat, k)


def newest_alone(offers: Sequence[Offer], is_sharded: bool) -> Plan | None:
    return agreement.decide(offers)


def mixes_gangs(offers: Sequence[Offer], is_sharded: bool) -> Plan | None:
    plan = agreement.decide(offers, is_sharded)
    if plan is None or not plan.own:
        return plan
    own = []
    for source in plan.own:
        for place in agreement.PLACES:
            for reader, offer in enumerate(offers):
                for part in offer.at(place):
                    if part.rank == source.part.rank and part.version > plan.version:
                        source = agreement.Source(place, part, (reader,))
        own.append(source)
    return plan._replace(own=tuple(own))


def newest_copies(
    offers: Sequence[Offer], members: Sequence[Member], plan: Plan | None, is_sharded: bool
) -> Version | None:
    found = agreement.decide([Offer(replicas=offer.replicas) for offer in offers], True)
    return None if found is None else found.version


def kept_at_the_same_size(
    offers: Sequence[Offer], members: Sequence[Member], plan: Plan | None, is_sharded: bool
) -> Version | None:
    same = [
        Offer(replicas=tuple(part for part in offer.replicas if part.ranks == len(offers)))
        for offer in offers
    ]
    return replicas.kept(same, members, plan, is_sharded)


BUGS = {
    "confirms a generation with one rank": Rules(generations=ConfirmsWithOne),
    "counts a failed copy": Rules(generations=CountsFailures),
    "does not wait for copies": Rules(generations=ConfirmsWithoutWaiting),
    "accepts delayed copies": Rules(accepted=AcceptsAll),
    "copies to its own node": Rules(receivers=own_node),
    "sends one copy fewer": Rules(receivers=one_copy_fewer),
    "ignores domains": Rules(receivers=same_domain),
    "keeps nothing after a restore": Rules(kept=lambda *_: None),
    "keeps the newest copies, which may be partial": Rules(kept=newest_copies),
    "keeps the restored version": Rules(
        kept=lambda offers, members, plan, _: None if plan is None else plan.version
    ),
    "overwrites the first buffer": Rules(overwrites=lambda held, keep: 0),
    "overwrites the confirmed copy": Rules(
        overwrites=lambda held, keep: next(
            (i for i, part in enumerate(held) if part is not None and part.version == keep), 0
        )
    ),
    "drops before a generation is confirmed": Rules(
        may_drop=lambda part, here, generations: part.rank not in here
    ),
    "drops what it holds": Rules(
        may_drop=lambda part, here, generations: generations.has_confirmed
    ),
    "removes the confirmed copies as stale": Rules(
        is_stale=lambda part, needed, ranks, is_sharded: part.version != needed[1]
    ),
    "restores shared state without the parts": Rules(decide=newest_alone),
    "mixes versions": Rules(decide=mixes_gangs),
    "acknowledges before the commit": Rules(acknowledges_early=True),
    "sender does not name the confirmed version": Rules(names_the_confirmed=False),
    "keeps nothing of another number of ranks": Rules(kept=kept_at_the_same_size),
    "loads without a check, and writes in place": Rules(
        checks_the_content=False, erases_the_record=False
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_simulation_finds_the_planted_bug(bug: str) -> None:
    assert fails(BUGS[bug])
