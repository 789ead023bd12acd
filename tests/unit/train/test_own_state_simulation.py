"""Copies at a stop of ranks with states of their own, in simulated gangs, and planted bugs.

A rank is killed, or a node is lost with its memory, at any point of a step, of a write, of a copy
to the other node or of a restore; the others go on until they wait for it, and copy. Ranks may be a
step apart.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from elasticjob.train.snapshots.core import agreement, replicas
from elasticjob.train.snapshots.core.agreement import (
    SHARED,
    Offer,
    Part,
    Plan,
    Version,
    buffer_at_stop,
    decide,
    next_gang,
    part_at_stop,
)
from tests.unit.train.simulated import Buffer, Violation, are_broken, pair

SEEDS = 600
ROUNDS = 5
NODES = 2
Actor = Iterator[None]


@dataclass(frozen=True)
class Rules:
    """Decisions of the product; a planted bug replaces one of them."""

    slot: Callable[..., int] = agreement.buffer_to_overwrite
    has_own_parts: Callable[..., bool] = agreement.has_own_parts
    decide: Callable[..., Plan | None] = agreement.decide
    step_slot: Callable[..., int | None] = replicas.step_to_overwrite
    own_first: bool = True
    own_parts_alone: bool = True
    counts_ranks: bool = True


@dataclass
class Node:
    buffers: dict[str, list[Buffer]] = field(default_factory=dict)
    is_locked: bool = False

    def of(self, name: str) -> list[Buffer]:
        return self.buffers.setdefault(name, pair())

    def held(self, name: str) -> list[Part | None]:
        return [each.part for each in self.of(name)]

    def parts(self, without: str = "none") -> dict[Part, Buffer]:
        names = [name for name in self.buffers if not name.startswith(without)]
        every = [each for name in names for each in self.of(name)]
        return {each.part: each for each in every if each.part is not None}


@dataclass
class Rank:
    """Worker: what it holds, and the points that it has reached in its collectives."""

    number: int
    local: int
    node: Node
    newest: Version
    last_step: int
    last: dict[str, Part | None] = field(default_factory=dict)
    held: tuple[Part, Version] | None = None
    in_backward: int = -1
    in_schedule: int = -1
    is_stuck: bool = False
    waiting: deque[Part] = field(default_factory=lambda: deque(maxlen=2))


class World:
    def __init__(self, seed: int, rules: Rules) -> None:
        self.random = random.Random(seed)
        self.rules = rules
        self.nodes = [Node() for _ in range(NODES)]
        self.local_ranks = self.random.choice((1, 2, 3))
        self.size = NODES * self.local_ranks
        self.interval = self.random.choice((1, 3, 5))
        self.safe = -1
        self.copied: set[Part] = set()

    def run(self) -> None:
        for _ in range(ROUNDS):
            self.round()

    def round(self) -> None:
        offers = [
            Offer(tuple(self.nodes[at // self.local_ranks].parts())) for at in range(self.size)
        ]
        plan = self.rules.decide(offers)
        self.check(plan)
        self.gang = next_gang(offers, self.random.getrandbits(32))
        version = Version(0, 0) if plan is None else plan.version
        for node in self.nodes:
            for name in [each for each in node.buffers if each.startswith("step-")]:
                for buffer in node.of(name):
                    if buffer.part is not None and buffer.part.version != version:
                        buffer.part = None
        ranks = [
            Rank(
                at, at % self.local_ranks, self.nodes[at // self.local_ranks], version, version.step
            )
            for at in range(self.size)
        ]
        actors = {rank.number: self.work(rank, ranks, plan) for rank in ranks}
        links = {rank.number: self.link(rank) for rank in ranks}
        for _ in range(self.random.randrange(15 * self.size)):
            number = self.random.choice(list(actors))
            for _ in range(self.random.choice((1, 1, 2, 20))):  # a rank may be ahead
                next(actors[number], None)
                next(links[number], None)
        killed = [ranks[self.random.randrange(self.size)]]
        if self.random.random() < 0.4:
            lost = killed[0].node
            killed = [rank for rank in ranks if rank.node is lost]
            self.nodes[self.nodes.index(lost)] = Node()
        for rank in killed:
            actors.pop(rank.number).close()  # type: ignore[attr-defined]
            links.pop(rank.number).close()  # type: ignore[attr-defined]
        if len(killed) > 1 or killed[0].node not in self.nodes:
            links.clear()  # their peers are lost
        for rank in ranks:
            rank.is_stuck = self.random.random() < 0.3
        for _ in range(self.random.choice((0, 5, 200)) * self.size):
            if actors:
                next(actors[self.random.choice(list(actors))], None)
            if links:
                next(links[self.random.choice(list(links))], None)
        self.stop([rank for rank in ranks if rank not in killed], actors)

    def check(self, plan: Plan | None) -> None:
        step = -1 if plan is None else plan.version.step
        if step < self.safe:
            raise Violation(f"step {step} is restored, {self.safe} was complete")
        if plan is None:
            return
        if self.safe >= 0 and len(plan.own) != self.size:
            raise Violation("the own states of the ranks are lost")
        for source in (plan.shared, *plan.own):
            for reader in source.readers:
                found = self.nodes[reader // self.local_ranks].parts()[source.part]
                if found.content != source.part:
                    raise Violation("a damaged part is restored")
                if found.content.version != plan.version:
                    raise Violation("parts of two steps are combined")

    def work(self, rank: Rank, ranks: list[Rank], plan: Plan | None) -> Actor:
        if plan is not None:
            yield from self.seed(rank, plan)
        step = rank.last_step
        while True:
            rank.in_backward = step + 1
            while rank.is_stuck or any(each.in_backward <= step for each in ranks):
                yield
            rank.held = None
            yield
            step += 1
            yield from self.save(rank, ranks, step)

    def seed(self, rank: Rank, plan: Plan) -> Actor:
        for name in (f"rank-{rank.local}", f"own-{rank.local}", "shared"):
            parts = [part for part in rank.node.held(name) if part is not None]
            newest = max((each for each in parts if each.version <= plan.version), default=None)
            if newest is not None and (name[0] != "o" or newest.version == plan.version):
                rank.last[name] = newest
        for own in [plan.own[rank.number].part] if plan.own else []:
            if own not in rank.node.held(f"rank-{rank.local}"):
                yield from self.commit(rank, f"rank-{rank.local}", own)
        if rank.local == 0 and plan.shared.part not in rank.node.held("shared"):
            yield from self.commit(rank, "shared", plan.shared.part)

    def save(self, rank: Rank, ranks: list[Rank], step: int) -> Actor:
        version, is_due = Version(step, self.gang), step >= rank.last_step + self.interval
        count = self.size if self.rules.counts_ranks else 0
        part = Part(version, SHARED, count, rank.last_step)
        if not is_due:
            part = part_at_stop(version, self.interval, count)
        if not self.rules.own_first:
            rank.held = part, rank.newest
        own = part._replace(rank=rank.number)
        yield from self.commit(rank, f"own-{rank.local}", own)
        rank.waiting.append(own)
        rank.held = part, rank.newest
        yield
        if not is_due:
            return
        rank.in_schedule = step
        while any(each.in_schedule < step for each in ranks):
            yield
        rank.last_step, rank.newest = step, version
        yield from self.commit(rank, f"rank-{rank.local}", part._replace(rank=rank.number))
        if rank.local == 0:
            yield from self.locked(rank.node)
            try:
                if buffer_at_stop(rank.node.held("shared"), part, version) is not None:
                    yield from self.commit(rank, "shared", part)
            finally:
                rank.node.is_locked = False

    def link(self, rank: Rank) -> Actor:
        """Copy the own part of each step to the other node."""
        peer = next(node for node in self.nodes if node is not rank.node)
        name = f"step-{rank.number}"
        while True:
            yield
            if rank.waiting:
                part = rank.waiting.popleft()
                index = self.rules.step_slot(peer.held(name), part)
                if index is not None:
                    yield from self.write(peer.of(name)[index], part)
                self.copied.add(part)

    def locked(self, node: Node) -> Actor:
        while node.is_locked:
            yield
        node.is_locked = True

    def commit(self, rank: Rank, name: str, part: Part) -> Actor:
        choose = self.rules.slot if name.startswith("own") else agreement.buffer_to_overwrite
        index = choose(rank.node.held(name), rank.last.get(name))
        yield from self.write(rank.node.of(name)[index], part)
        rank.last[name] = part

    def write(self, buffer: Buffer, part: Part) -> Actor:
        buffer.part = None
        yield
        buffer.content = None
        yield
        buffer.content = part
        yield
        buffer.part = part
        yield

    def stop(self, ranks: list[Rank], actors: dict[int, Actor]) -> None:
        """Let all ranks copy what they hold, one of them possibly killed meanwhile."""
        there = {part for node in self.nodes for part in node.parts()}
        self.safe = max((each.step for each in agreement.complete_versions(there)), default=-1)
        held = {rank.held[0] for rank in ranks if rank.held is not None}
        here = {rank.number for rank in ranks}
        lost = {part for part in self.copied if part.rank not in here}  # each copy must be there
        ends = self.random.choice((None, None, self.random.randrange(20)))
        if ends is None:
            for part in held:
                if all(part._replace(rank=rank) in there | lost for rank in range(self.size)):
                    self.safe = max(self.safe, part.version.step)
        copies = {rank.number: self.copy(rank, actors[rank.number]) for rank in ranks}
        at = 0
        while copies:
            number = self.random.choice(list(copies))
            if at == ends:  # killed
                copies.pop(number).close()  # type: ignore[attr-defined]
                actors[number].close()  # type: ignore[attr-defined]
            elif next(copies[number], "done") == "done":
                del copies[number]
            at += 1

    def copy(self, rank: Rank, actor: Actor) -> Actor:
        if rank.held is None or rank.held[0].version == rank.newest:
            # It is within a regular snapshot, which is completed, or holds nothing.
            for _ in range(20):
                next(actor, None)
                yield
        actor.close()  # type: ignore[attr-defined]
        if rank.held is None:
            return
        part, keep = rank.held
        yield from self.locked(rank.node)
        try:
            there = rank.node.parts("step-" if self.rules.own_parts_alone else "none")
            if self.rules.has_own_parts(part, there, self.local_ranks):
                index = buffer_at_stop(rank.node.held("shared"), part, keep)
                if index is not None:
                    yield from self.write(rank.node.of("shared")[index], part)
        finally:
            rank.node.is_locked = False


def test_copies_with_own_states_lose_no_complete_step() -> None:
    for seed in range(SEEDS):
        World(seed, Rules()).run()


def mixes_steps(offers: list[Offer]) -> Plan | None:
    """Take the newest own part of each rank, whatever its step."""
    plan = decide(offers)
    if plan is None or not plan.own:
        return plan
    found = []
    for source in plan.own:
        parts = [part for offer in offers for part in offer.memory if part.rank == source.part.rank]
        newest = max(parts)
        readers = [at for at, offer in enumerate(offers) if newest in offer.memory]
        found.append(source._replace(part=newest, readers=tuple(readers)))
    return plan._replace(own=tuple(found))


BUGS = {
    "one slot for the own state": Rules(slot=lambda *_: 0),
    "replaces the own state of the step before": Rules(
        slot=lambda held, last: held.index(last) if last in held else 0
    ),
    "copies without the own states of the node": Rules(has_own_parts=lambda *_: True),
    "takes a rank's own state of another step": Rules(decide=mixes_steps),
    "leaves the own states behind": Rules(counts_ranks=False),
    "one slot for the copy of another rank's state": Rules(step_slot=lambda *_: 0),
    "counts the copies of other ranks as own parts": Rules(own_parts_alone=False),
    "overwrites the newer copy": Rules(
        step_slot=lambda held, _: (
            max((part, index) for index, part in enumerate(held))[1]
            if None not in held
            else held.index(None)
        )
    ),
}


def fails(rules: Rules) -> bool:
    return are_broken(World(seed, rules).run for seed in range(SEEDS))


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found(name: str) -> None:
    assert fails(BUGS[name])
