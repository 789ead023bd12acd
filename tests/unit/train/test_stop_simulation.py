"""Invariants of copies at a stop in simulated gangs of replicated state, and planted bugs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from elasticjob.train.snapshots.core import agreement
from elasticjob.train.snapshots.core.agreement import (
    SHARED,
    Offer,
    Part,
    Plan,
    Version,
    buffer_to_overwrite,
    decide,
    interval_before,
    next_gang,
)
from tests.unit.train.simulated import Violation, are_broken

SEEDS = 1500
ROUNDS = 6
INTERVAL = 4
Actor = Iterator[None]


@dataclass
class Rules:
    """Decisions of the product; a planted bug replaces one of them."""

    buffer: Callable[..., int | None] = agreement.buffer_at_stop
    part: Callable[[Version, int], Part] = agreement.part_at_stop
    ahead: Callable[..., int] = agreement.buffer_ahead
    locks: bool = True
    checks_the_step: bool = True


@dataclass
class Buffer:
    part: Part | None = None
    content: Version | None = None


@dataclass
class Node:
    buffers: list[Buffer] = field(default_factory=lambda: [Buffer(), Buffer()])
    last: Part | None = None
    is_locked: bool = False
    copied: int = -1
    is_killed: bool = False

    def damaged_of(self, gang: int | None = None) -> list[Part]:
        """Return the damaged parts, of one gang or of all."""
        found = [
            each.part for each in self.buffers if each.part and each.part.version != each.content
        ]
        return [part for part in found if gang in (None, part.version.gang)]

    def parts(self) -> list[Part | None]:
        return [each.part for each in self.buffers]


class World:
    """Gang of two nodes with one or two ranks each, in rounds that end with a fault."""

    def __init__(self, seed: int, rules: Rules) -> None:
        self.random = random.Random(seed)
        self.rules = rules
        self.nodes = [Node(), Node()]
        self.local_ranks = self.random.choice((1, 2))
        self.safe = -1
        self.held: set[Version] = set()

    def run(self) -> None:
        for _ in range(ROUNDS):
            self.train(self.restore())

    def restore(self) -> int:
        refused: set[tuple[int, Part]] = set()
        while True:
            offers = [
                Offer(tuple(p for p in node.parts() if p is not None and (at, p) not in refused))
                for at, node in enumerate(self.nodes)
            ]
            plan = decide(offers)
            bad = {
                (at, plan.shared.part)
                for at in (plan.shared.readers if plan else ())
                for each in self.nodes[at].buffers
                if plan and each.part == plan.shared.part and each.content != plan.version
            }
            if plan is not None:
                self.receive(plan, agreement.version_after(plan, offers))
            if not bad:
                break
            refused |= bad
        self.check(plan, offers)
        for at, part in refused:
            for each in self.nodes[at].buffers:
                if each.part == part and self.random.random() < 0.5:  # else by another process
                    each.part = None
        self.gang = next_gang(offers, self.random.getrandbits(32))
        self.newest = Version(0, 0) if plan is None else plan.version
        for node in self.nodes:
            node.last = None if plan is None else plan.shared.part
            if node.last is not None and node.last not in node.parts():
                index = buffer_to_overwrite(node.parts(), None)
                list(self.write(node, node.buffers[index], node.last))
        return self.newest.step

    def receive(self, plan: Plan, keep: Version | None) -> None:
        """Write the part ahead where it lacks, before its reader knows that it is whole."""
        for node in self.nodes:
            if plan.shared.part not in node.parts():
                node.buffers[self.rules.ahead(node.parts(), keep)].part = None

    def check(self, plan: Plan | None, offers: list[Offer]) -> None:
        step = -1 if plan is None else plan.version.step
        if step < self.safe:
            raise Violation("training goes back further than a complete snapshot or copy")
        if plan is None:
            return
        if plan.version not in self.held:
            raise Violation("a state is restored that no rank had")
        # The first snapshot of the gang tells no interval.
        if plan.shared.part.before > INTERVAL and interval_before(plan, offers) != INTERVAL:
            raise Violation("the interval changes with a fault")

    def train(self, step: int) -> None:
        begun, last, writers = step, step, dict[int, Actor]()
        for step in range(begun + 1, begun + 1 + self.random.randrange(1, 12)):
            if step < last + INTERVAL:
                continue
            part = Part(Version(step, self.gang), SHARED, 0, last)
            before, self.newest, last = self.newest, part.version, step
            writers = {at: self.save(node, part) for at, node in enumerate(self.nodes)}
            self.held.add(part.version)
            if step > begun and self.random.random() < 0.2:
                break  # the fault is during these writes
            for writer in writers.values():
                list(writer)
            writers = {}
        for writer in writers.values():
            for _ in range(self.random.randrange(7)):
                next(writer, None)
        self.fault(step, last, before if writers else self.newest, writers)

    def fault(self, step: int, last: int, former: Version, writers: dict[int, Actor]) -> None:
        """Kill a rank or lose a node; the other ranks copy, and may be killed meanwhile."""
        lost, is_writing = self.random.choice((0, 1, None)), bool(writers)
        killed = (self.random.randrange(2), self.random.randrange(self.local_ranks))
        if lost is not None:
            self.nodes[lost] = Node()
        for node in self.nodes:
            share = self.random.choice((0.02, 0.02, 0.5))
            for each in node.buffers:
                if self.random.random() < share:
                    each.content = None  # damage
        # A copy may overwrite the other buffer of a node whose newest part is damaged.
        whole = [
            each.part.version.step
            for node in self.nodes
            for each in node.buffers
            if each.part is not None and not node.damaged_of()
        ]
        self.safe = max(whole, default=-1)
        actors: dict[Actor, tuple[Node, int | None]] = {}
        processes: dict[Actor, list[Actor]] = {}
        for at, node in enumerate(self.nodes):
            node.copied, node.is_killed = -1, False
            if (at == lost or (lost is None and (at, 0) == killed)) and at in writers:
                writers.pop(at).close()  # type: ignore[attr-defined]
            for local_rank in range(self.local_ranks):
                if at == lost or (lost is None and (at, local_rank) == killed):
                    continue
                writer = writers.get(at) if local_rank == 0 else None
                ahead = 0 if writer is not None else self.random.randrange(2)
                version = Version(step + ahead, self.gang)
                self.held.add(version)
                keep = former if is_writing and not ahead else self.newest
                if version == self.newest:
                    part = Part(version, SHARED, 0, former.step)
                else:
                    part = self.rules.part(version, INTERVAL)
                    if self.rules.part is not agreement.part_at_stop:
                        part = part._replace(before=last)
                ends = self.random.choice((None, None, self.random.randrange(12)))
                actor = self.stop(node, writer, part, keep)
                actors[actor] = (node, ends)
                processes[actor] = [actor] if writer is None else [actor, writer]
        while actors:
            actor = self.random.choice(list(actors))
            node, ends = actors[actor]
            actors[actor] = (node, None if ends is None else ends - 1)
            if ends == 0:  # killed
                del actors[actor]
                for process in processes[actor]:
                    process.close()  # type: ignore[attr-defined]
                node.is_killed = True
            elif next(actor, "done") == "done":
                del actors[actor]
        # A rank that is a step ahead may be killed while it replaces the copy of another one.
        copied = [node.copied for node in self.nodes if not node.is_killed]
        self.safe = max([self.safe, *copied])

    def stop(self, node: Node, writer: Actor | None, part: Part, keep: Version) -> Actor:
        yield from writer or ()
        while node.is_locked and self.rules.locks:
            yield
        node.is_locked = True
        try:
            index = self.rules.buffer(node.parts(), part, keep)
            if index is not None:
                yield from self.write(node, node.buffers[index], part)
            if index is not None or not node.damaged_of(self.gang):
                node.copied = max(node.copied, part.version.step)
        finally:
            node.is_locked = False

    def save(self, node: Node, part: Part) -> Actor:
        while node.is_locked and self.rules.locks:
            yield
        node.is_locked = True
        try:
            past = agreement.buffer_at_stop(node.parts(), part, part.version) is None
            if not past or not self.rules.checks_the_step:
                index = buffer_to_overwrite(node.parts(), node.last)
                yield from self.write(node, node.buffers[index], part)
                node.last = part
        finally:
            node.is_locked = False

    def write(self, node: Node, buffer: Buffer, part: Part) -> Actor:
        buffer.part = None
        yield
        buffer.content = None
        yield
        buffer.content = part.version
        yield
        buffer.part = part
        yield


def test_copies_at_stops_never_lose_a_snapshot() -> None:
    for seed in range(SEEDS):
        World(seed, Rules()).run()


def overwrites_the_newest(held: list[Part | None], part: Part, keep: Version) -> int | None:
    index = agreement.buffer_at_stop(held, part, keep)
    return None if index is None else 1 - index if None not in held else index


def compares_all_gangs(held: list[Part | None], part: Part, keep: Version) -> int | None:
    if any(each is not None and each.version.step >= part.version.step for each in held):
        return None
    return agreement.buffer_at_stop(held, part, keep)


def writes_always(held: list[Part | None], part: Part, keep: Version) -> int | None:
    return agreement.buffer_at_stop(held, part._replace(version=Version(2**60, 0)), keep)


BUGS = {
    "overwrites the newest snapshot": Rules(buffer=overwrites_the_newest),
    "compares steps of several gangs": Rules(buffer=compares_all_gangs),
    "writes an older step over a newer one": Rules(buffer=writes_always),
    "takes the steps since the last snapshot as the interval": Rules(
        part=lambda version, _: agreement.part_at_stop(version, 1)
    ),
    "overwrites the version to go back to": Rules(
        ahead=lambda held, _: agreement.buffer_to_overwrite(held, None)
    ),
    "two ranks write at once": Rules(locks=False),
    "replaces a copy by an older regular one": Rules(checks_the_step=False),
}


def fails(rules: Rules) -> bool:
    return are_broken(World(seed, rules).run for seed in range(SEEDS))


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found(name: str) -> None:
    assert fails(BUGS[name])
