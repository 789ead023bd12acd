"""Agreement on snapshots: tables, and a simulation with crashes, lost nodes and planted bugs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from elasticjob.train.snapshots.core import agreement
from elasticjob.train.snapshots.core.agreement import (
    MEMORY,
    SHARED,
    STORAGE,
    Offer,
    Part,
    Plan,
    Version,
    buffer_to_overwrite,
    complete_versions,
    decide,
    expired,
    interval_before,
    next_gang,
    part_at_stop,
    sizes_of,
    steps_between,
    version_after,
)
from tests.unit.train.simulated import Buffer, Violation, are_broken, pair


def shared(step: int, gang: int = 1, ranks: int = 0) -> Part:
    return Part(Version(step, gang), SHARED, ranks, step - 1)


def own(step: int, rank: int, ranks: int, gang: int = 1) -> Part:
    return Part(Version(step, gang), rank, ranks, step - 1)


def test_no_offer_is_no_plan() -> None:
    assert decide([Offer(), Offer()]) is None
    assert decide([Offer(memory=(own(3, 0, 1),))]) is None


def test_newest_version_wins_over_place_and_rank() -> None:
    plan = decide([Offer(memory=(shared(3),), storage=(shared(5),)), Offer(memory=(shared(4),))])
    assert plan is not None
    assert (plan.version.step, plan.shared.place, plan.shared.readers) == (5, STORAGE, (0,))


@pytest.mark.parametrize(
    ("snapshots", "steps"),
    [
        ([], 1),
        ([(1, 0)], 1),
        ([(120, 100), (100, 80)], 20),
        ([(100, 80)], 20),  # the worker was killed while it overwrote the one before
        ([(101, 100), (100, 80)], 1),
        ([(100, 100), (80, 60)], 1),  # taken anew at the same step
        ([(120, 100), (100, 100)], 20),
        ([(5, 1), (1, 0)], 4),  # after the first snapshot of the training
        ([(50001, 0)], 1),  # the first snapshot of a training that continued a checkpoint
        ([(50002, 50001), (50001, 0)], 1),
        ([(50001, 100), (100, 80)], 20),
        ([(50001, 100), (100, 80), (70, 69)], 20),
    ],
)
def test_interval_of_the_restored_snapshot_is_that_between_two_snapshots(
    snapshots: list[tuple[int, int]], steps: int
) -> None:
    parts = [Part(Version(step, 1), SHARED, 0, before) for step, before in snapshots]
    offers = [Offer(memory=tuple(parts[:1])), Offer(), Offer(storage=tuple(parts[1:]))]
    assert interval_before(decide(offers), offers) == steps


@pytest.mark.parametrize("step", [12, 80])
def test_interval_of_a_copy_at_a_stop_is_that_at_the_stop(step: int) -> None:
    """Others measured it, or were taken early to measure it."""
    copied = part_at_stop(Version(step, 1), 70)
    others = (shared(1), shared(5), shared(10))
    offers = [Offer(memory=(copied, *others)), Offer(memory=others)]
    assert interval_before(decide(offers), offers) == 70


@pytest.mark.parametrize(
    ("memory", "storage", "step"),
    [
        ((shared(8, gang=2), shared(7), shared(5)), (), 7),
        ((shared(8, gang=2), shared(8), shared(7)), (), 8),
        ((shared(8, gang=2),), (shared(6), shared(8, gang=2)), 6),
        ((shared(8, gang=2),), (), None),
        ((), (), None),
    ],
)
def test_version_after_that_of_a_plan_is_the_next_one_to_load(
    memory: tuple[Part, ...], storage: tuple[Part, ...], step: int | None
) -> None:
    offers = [Offer(memory=memory), Offer(storage=storage)]
    found = version_after(decide(offers), offers)
    assert found == (None if step is None else Version(step, 1))


def test_version_after_that_of_a_plan_is_complete_if_the_state_is_sharded() -> None:
    complete = [(shared(step, 1, 2), own(step, 0, 2), own(step, 1, 2)) for step in (9, 5)]
    offers = [Offer(memory=(*complete[0], shared(7, 1, 2), own(7, 0, 2))), Offer(complete[1])]
    plan = decide(offers, True)
    assert version_after(plan, offers, True) == Version(5, 1)
    assert version_after(plan, offers) == Version(7, 1)


def test_memory_is_preferred_to_storage_of_the_same_version() -> None:
    offers = [Offer(storage=(shared(5),)), Offer(memory=(shared(5),)), Offer(memory=(shared(5),))]
    plan = decide(offers)
    assert plan is not None
    assert plan.shared == agreement.Source(MEMORY, shared(5), (1, 2))


def test_version_without_the_part_of_one_rank_yields_to_the_one_before_it() -> None:
    first = Offer(memory=(shared(7, 1, 2), shared(8, 1, 2), own(7, 0, 2), own(8, 0, 2)))
    second = Offer(memory=(own(6, 1, 2), own(7, 1, 2)))
    plan = decide([first, second])
    assert plan is not None
    assert plan.version.step == 7
    assert [source.readers for source in plan.own] == [(0,), (1,)]


@pytest.mark.parametrize("place", [MEMORY, STORAGE])
def test_sharded_snapshot_without_states_of_the_ranks_lacks_nothing(place: str) -> None:
    older, newer = (shared(7, 1, 2), own(7, 0, 2), own(7, 1, 2)), (shared(8),)
    plan = decide([Offer(**{place: older + newer}), Offer()], is_sharded=True)
    assert plan == Plan(agreement.Source(place, shared(8), (0,)))


def test_parts_of_a_lost_node_do_not_cost_steps() -> None:
    survivor = Offer(
        memory=(shared(7, 1, 2), shared(8, 1, 2), own(7, 0, 2), own(8, 0, 2)),
        storage=(shared(5, 1, 2), own(5, 0, 2), own(5, 1, 2)),
    )
    plan = decide([survivor, Offer(storage=survivor.storage)])
    assert plan is not None
    assert (plan.version.step, plan.own) == (8, ())


def at_stop(step: int, rank: int = SHARED) -> Part:
    return part_at_stop(Version(step, 1), 10, 2)._replace(rank=rank)


@pytest.mark.parametrize(
    ("own_parts", "expected"),
    [
        ([(20, 0), (20, 1), (27, 0), (27, 1)], (27, 2)),
        ([(20, 0), (20, 1), (27, 0)], (20, 2)),
        ([(20, 0), (20, 1), (26, 1), (27, 0)], (20, 2)),  # never of two steps
        ([(26, 0), (26, 1), (27, 0)], (26, 2)),
        ([(10, 0), (10, 1), (20, 0), (27, 0)], (10, 2)),  # the node of rank 1 was lost
        ([(10, 0), (20, 0), (27, 0)], (27, 0)),
    ],
)
def test_copy_at_a_stop_without_an_own_state_yields_to_the_snapshots_of_all_ranks(
    own_parts: list[tuple[int, int]], expected: tuple[int, int]
) -> None:
    regular = {step: Part(Version(step, 1), SHARED, 2, step - 10) for step in (10, 20)}
    every = {**regular, 26: at_stop(26), 27: at_stop(27)}
    found = [every[step]._replace(rank=rank) for step, rank in own_parts]
    plan = decide([Offer(memory=(*every.values(), *found)), Offer()])
    assert plan is not None
    assert (plan.version.step, len(plan.own)) == expected


def test_parts_of_two_gangs_in_one_step_are_not_combined() -> None:
    offers = [
        Offer(memory=(shared(8, 1, 2), own(8, 0, 2, gang=1))),
        Offer(memory=(own(8, 1, 2, gang=2),)),
    ]
    plan = decide(offers)
    assert plan is not None
    assert plan.own == ()


def test_parts_of_another_number_of_ranks_are_not_loaded() -> None:
    offer = Offer(memory=(shared(8, 1, 2), own(8, 0, 2), own(8, 1, 2)))
    plan = decide([offer])
    assert plan is not None
    assert (plan.version.step, plan.own) == (8, ())


def test_rank_that_moved_to_another_node_gets_its_part_from_there() -> None:
    offers = [
        Offer(memory=(shared(8, 1, 2), own(8, 1, 2))),
        Offer(memory=(shared(8, 1, 2), own(8, 0, 2))),
    ]
    plan = decide(offers)
    assert plan is not None
    assert [source.readers for source in plan.own] == [(1,), (0,)]


def test_parts_of_former_ranks_in_storage_are_read_by_all_ranks() -> None:
    stored = [own(8, rank, 8)._replace(reshards=True) for rank in (SHARED, *range(8))]
    plan = decide([Offer(storage=tuple(stored))] * 3, True)
    assert plan is not None
    readers = [source.readers[0] for source in plan.own]
    assert readers[:3] == [0, 1, 2]
    assert sorted(readers.count(rank) for rank in range(3)) == [2, 3, 3]


def test_parts_that_reshard_demand_no_number_of_ranks() -> None:
    """A node was lost before its parts were copied: the survivors begin anew."""
    parts = (shared(8, 1, 4), own(8, 0, 4), own(8, 1, 4))
    lost = Offer(memory=tuple(part._replace(reshards=True) for part in parts))
    assert decide([lost, Offer()], True) is None
    assert sizes_of([lost, Offer()]) == set()
    assert sizes_of([Offer(memory=parts)]) == {4}


@pytest.mark.parametrize(
    ("held", "keep", "expected"),
    [
        ([None, None], None, 0),
        ([shared(1), None], shared(1), 1),
        ([shared(1), shared(2)], shared(2), 0),
        ([shared(3), shared(2)], shared(3), 1),
        ([shared(3), shared(2)], shared(2), 0),
        ([shared(3, gang=1), shared(3, gang=2)], shared(3, gang=1), 1),
        ([shared(3), shared(3)], shared(3), 0),
    ],
)
def test_buffer_with_the_last_part_is_not_overwritten(
    held: Sequence[Part | None], keep: Part | None, expected: int
) -> None:
    assert buffer_to_overwrite(held, keep) == expected


@pytest.mark.parametrize(
    ("every", "steps", "seconds", "expected"),
    [(1.0, 10, 1.0, 10), (1.0, 3, 1.0, 3), (0.1, 1, 5.0, 1), (1.0, 0, 0.0, 1), (1.0, 2, 3.0, 1)],
)
def test_seconds_become_steps(every: float, steps: int, seconds: float, expected: int) -> None:
    assert steps_between(every, steps, seconds) == expected


def test_retention_counts_complete_versions_alone() -> None:
    parts = [
        *(shared(1), shared(2), own(3, 0, 1)),
        *(shared(4, ranks=2), own(4, 0, 2), own(4, 1, 2)),
        *(shared(5, ranks=2), own(5, 0, 2)),
    ]
    last = Version(5, 1)
    assert complete_versions(parts) == [Version(step, 1) for step in (1, 2, 4)]
    assert [version.step for version in expired(parts, 1, last)] == [1, 2, 3]
    assert [version.step for version in expired(parts, 2, last)] == [1]
    assert expired(parts, 4, last) == ()
    assert expired([shared(5, ranks=2)], 1, last) == ()


def test_incomplete_versions_that_no_rank_writes_expire() -> None:
    """Each rank ends the write before the one that it begins."""
    parts = [own(2, 0, 2), shared(3), *(own(step, 0, 2) for step in (4, 5, 6, 7))]
    versions = [Version(1, 1), *(part.version for part in parts)]
    found = expired(parts, 3, Version(7, 1), versions)
    assert [version.step for version in found] == [1, 2, 4, 5]


# --- simulation

SEEDS = 300
NODES, RANKS_OF_A_NODE, STORE_EVERY = 3, 2, 5
RANKS = NODES * RANKS_OF_A_NODE
Decide = Callable[[Sequence[Offer]], "Plan | None"]
Overwrite = Callable[[Sequence["Part | None"], "Part | None"], int]


@dataclass
class Node:
    buffers: dict[str, list[Buffer]] = field(default_factory=dict)
    last: dict[str, Part] = field(default_factory=dict)

    def named(self, name: str) -> list[Buffer]:
        return self.buffers.setdefault(name, pair())

    def parts(self) -> tuple[Part, ...]:
        return tuple(
            each.part for pair in self.buffers.values() for each in pair if each.part is not None
        )

    def content(self, part: Part) -> Part | None:
        for buffers in self.buffers.values():
            for each in buffers:
                if each.part == part:
                    return each.content
        raise AssertionError("not offered")


class World:
    """Nodes whose ranks save in lockstep and are all killed at any point of a write."""

    def __init__(self, seed: int, decides: Decide, overwrites: Overwrite) -> None:
        self.random = random.Random(seed)
        self.decides = decides
        self.overwrites = overwrites
        self.nodes = [Node() for _ in range(NODES)]
        self.storage: set[Part] = set()
        self.gang = 0
        self.done = 0

    def run(self) -> None:
        for _ in range(8):
            step = self.restore()
            self.train(step)
            for _ in range(self.random.choice((0, 0, 1, 2))):
                self.nodes[self.random.randrange(NODES)] = Node()
            if self.random.random() < 0.2:
                self.damage()
            self.random.shuffle(self.nodes)  # ranks move

    def train(self, step: int) -> None:
        """Save after each step until the gang is killed between two of its writes."""
        left = self.random.randrange(120)
        while True:
            step += 1
            writers = [self.save(rank, Version(step, self.gang)) for rank in range(RANKS)]
            while writers:
                if left == 0:
                    return
                left -= 1
                writer = self.random.choice(writers)
                if next(writer, "done") == "done":
                    writers.remove(writer)
            self.done = step

    def save(self, rank: int, version: Version):
        node, local = self.nodes[rank // RANKS_OF_A_NODE], rank % RANKS_OF_A_NODE
        parts = [(f"rank-{local}", Part(version, rank, RANKS, version.step - 1))]
        if local == 0:
            parts.append(("shared", Part(version, SHARED, RANKS, version.step - 1)))
        for name, part in parts:
            yield from self.commit(node, name, part)
            if version.step % STORE_EVERY == 0 and (part.rank != SHARED or rank == 0):
                self.storage.add(part)
                yield

    def commit(self, node: Node, name: str, part: Part):
        pair = node.named(name)
        index = self.overwrites([each.part for each in pair], node.last.get(name))
        pair[index].part = None
        yield
        pair[index].content = part
        yield
        pair[index].part = part
        node.last[name] = part
        yield

    def damage(self) -> None:
        pairs = [pair for node in self.nodes for pair in node.buffers.values()]
        if pairs:
            self.random.choice(self.random.choice(pairs)).content = None

    def restore(self) -> int:
        for node in self.nodes:
            node.last = {}
        refused: set[tuple[int, Part]] = set()
        stored = tuple(sorted(self.storage))
        while True:
            offers = [
                Offer(
                    tuple(part for part in node.parts() if (rank, part) not in refused),
                    storage=stored,
                )
                for rank, node in enumerate(n for n in self.nodes for _ in range(RANKS_OF_A_NODE))
            ]
            plan = self.decides(offers)
            self.gang = next_gang(offers, self.random.getrandbits(32))
            if plan is None:
                if any(each.rank == SHARED for offer in offers for each in offer.memory + stored):
                    raise Violation("nothing restored, although there is a snapshot")
                return 0
            sources = [plan.shared, *plan.own]
            bad = {
                (rank, source.part)
                for source in sources
                for rank in source.readers
                if source.place == MEMORY and self.node(rank).content(source.part) is None
            }
            if not bad:
                break
            refused |= bad
        self.check(plan, offers)
        self.seed(plan)
        return plan.version.step

    def node(self, rank: int) -> Node:
        return self.nodes[rank // RANKS_OF_A_NODE]

    def check(self, plan: Plan, offers: list[Offer]) -> None:
        expected = [plan.shared.part._replace(rank=rank) for rank in range(RANKS)]
        if plan.own and [source.part for source in plan.own] != expected:
            raise Violation("parts of several versions or ranks are combined")
        for source in (plan.shared, *plan.own):
            for rank in source.readers:
                if source.part not in offers[rank].at(source.place):
                    raise Violation("a part is loaded that was not committed")
                if source.place == MEMORY and self.node(rank).content(source.part) != source.part:
                    raise Violation("a part is loaded whose content is of another version")
        good = [each for offer in offers for each in offer.memory + offer.storage]
        newest = max(each.version.step for each in good if each.rank == SHARED)
        if plan.version.step < newest - 1 or (not plan.own and plan.version.step < newest):
            raise Violation("training goes back further than the survivors' snapshots")
        whole = not self.lossy and self.done > 0
        if whole and (not plan.own or plan.version.step < self.done):
            raise Violation("without a loss a completed step is repeated")

    lossy = True

    def seed(self, plan: Plan) -> None:
        for rank in range(RANKS):
            node, local = self.node(rank), rank % RANKS_OF_A_NODE
            parts = [(f"rank-{local}", plan.own[rank].part)] if plan.own else []
            if local == 0:
                parts.append(("shared", plan.shared.part))
            for name, part in parts:
                if part in node.parts():
                    node.last[name] = part
                else:
                    for _ in self.commit(node, name, part):
                        pass


class CalmWorld(World):
    """World without lost nodes and damage: writers crash, and ranks move."""

    lossy = False

    def run(self) -> None:
        for _ in range(8):
            step = self.restore()
            self.train(step)
            self.random.shuffle(self.nodes)


@pytest.mark.parametrize("world", [World, CalmWorld])
def test_invariants_hold_in_random_crashes_and_losses(world: type[World]) -> None:
    for seed in range(SEEDS):
        world(seed, decide, buffer_to_overwrite).run()


def loads_the_oldest(offers: Sequence[Offer]) -> Plan | None:
    parts = sorted(part for offer in offers for part in offer.memory if part.rank == SHARED)
    return (
        decide([Offer(tuple(p for p in o.memory if p.version == parts[0].version)) for o in offers])
        if parts
        else decide(offers)
    )


def ignores_the_gang(offers: Sequence[Offer]) -> Plan | None:
    plan = decide(offers)
    if plan is None or plan.own:
        return plan
    sources = []
    for rank in range(RANKS):
        for reader, offer in enumerate(offers):
            for part in offer.memory:
                if part.rank == rank and part.version.step == plan.version.step:
                    sources.append((rank, agreement.Source(MEMORY, part, (reader,))))
    found = dict(sources)
    return plan._replace(own=tuple(found[r] for r in range(RANKS))) if len(found) == RANKS else plan


def ignores_the_version_before(offers: Sequence[Offer]) -> Plan | None:
    plan = decide(offers)
    if plan is None:
        return None
    newest = max(p for o in offers for p in o.memory + o.storage if p.rank == SHARED)
    only = [
        Offer(
            *(tuple(p for p in o.at(at) if p.version == newest.version) for at in agreement.PLACES)
        )
        for o in offers
    ]
    return decide(only)


def prefers_complete_versions_in_storage(offers: Sequence[Offer]) -> Plan | None:
    plan = decide([Offer(storage=offer.storage) for offer in offers])
    return plan if plan is not None and plan.own else decide(offers)


@pytest.mark.parametrize(
    "bug",
    [
        loads_the_oldest,
        ignores_the_gang,
        ignores_the_version_before,
        prefers_complete_versions_in_storage,
    ],
)
def test_simulation_finds_a_planted_bug_of_the_decision(bug: Decide) -> None:
    assert any(
        fails(world, seed, bug, buffer_to_overwrite)
        for world in (World, CalmWorld)
        for seed in range(SEEDS)
    )


def overwrites_the_newest(held: Sequence[Part | None], keep: Part | None) -> int:
    return held.index(keep) if keep in held else 0


def forgets_the_restored(held: Sequence[Part | None], keep: Part | None) -> int:
    return buffer_to_overwrite(held, None)


@pytest.mark.parametrize("bug", [overwrites_the_newest, forgets_the_restored])
def test_simulation_finds_a_planted_bug_of_the_buffers(bug: Overwrite) -> None:
    assert any(fails(CalmWorld, seed, decide, bug) for seed in range(SEEDS))


def fails(world: type[World], seed: int, decides: Decide, overwrites: Overwrite) -> bool:
    return are_broken([world(seed, decides, overwrites).run])
