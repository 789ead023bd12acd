"""Simulated nodes that replicate snapshots: crashes, lost nodes and domains, delayed copies."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from elasticjob.train.snapshots.core import agreement, replicas
from elasticjob.train.snapshots.core.agreement import (
    MEMORY,
    SHARED,
    Offer,
    Part,
    Plan,
    Version,
    buffer_to_overwrite,
    next_gang,
)
from elasticjob.train.snapshots.core.replicas import Accepted, Generations, Member, State
from tests.unit.train.simulated import Buffer, Violation, pair

NODES = 4
DOMAINS = (0, 0, 1, 1)
ROUNDS = 8
Actor = Iterator[None]


@dataclass
class Rules:
    """Decisions of the product; a planted bug replaces one of them."""

    receivers: Callable[..., dict[int, tuple[int, ...]]] = replicas.receivers
    copies_at: Callable[..., frozenset[int]] = replicas.copies_at
    generations: type[Generations] = Generations
    accepted: type[Accepted] = Accepted
    kept: Callable[..., Version | None] = replicas.kept
    overwrites: Callable[..., int] = replicas.replica_to_overwrite
    may_drop: Callable[..., bool] = replicas.may_drop
    is_stale: Callable[..., bool] = replicas.is_stale
    decide: Callable[..., Plan | None] = agreement.decide
    acknowledges_early: bool = False
    names_the_confirmed: bool = True
    checks_the_content: bool = True
    erases_the_record: bool = True


@dataclass
class Node:
    name: str
    domain: str
    own: dict[int, list[Buffer]] = field(default_factory=dict)
    copies: dict[int, list[Buffer]] = field(default_factory=dict)

    def at(self, place: str) -> dict[int, list[Buffer]]:
        return self.own if place == MEMORY else self.copies

    def parts(self, place: str) -> tuple[Part, ...]:
        buffers = itertools.chain(*self.at(place).values())
        return tuple(each.part for each in buffers if each.part is not None)

    def content(self, place: str, part: Part) -> Part | None:
        found = [b.content for b in itertools.chain(*self.at(place).values()) if b.part == part]
        return found[0]


@dataclass
class Rank:
    """Worker of one node in one round."""

    generations: Generations
    accepted: Accepted
    last: dict[int, Part] = field(default_factory=dict)
    state: State = State.IDLE
    locked: set[int] = field(default_factory=set)
    told: list[State] = field(default_factory=list)


class World:
    """Gang with faults; with `reshards` its size changes, and any number of ranks restores."""

    def __init__(
        self, seed: int, rules: Rules, k: int, is_sharded: bool, reshards: bool = False
    ) -> None:
        self.reshards = reshards
        self.random = random.Random(seed)
        self.rules, self.k, self.is_sharded = rules, k, is_sharded
        self.names = itertools.count()
        self.nodes = [self.node(number) for number in range(NODES)]
        self.gang = 0
        self.safe: Version | None = None
        self.lost: set[str] = set()
        self.losses = 0
        self.most = k
        self.homes: dict[str, str] = {}
        self.committed: set[tuple[str, Part]] = set()

    def node(self, index: int) -> Node:
        return Node(f"node{next(self.names)}", f"machine{DOMAINS[index]}")

    def run(self) -> None:
        for _ in range(ROUNDS):
            step = self.restore()
            if step is None:
                return
            self.train(step, self.random.choice((0, 100, 200, 700)) + self.random.randrange(100))
            self.check_confirmed()
            self.lose()
            self.random.shuffle(self.nodes)

    def lose(self) -> None:
        """Replace some nodes, or a whole domain; count them since the last confirmed version."""
        kind = self.random.randrange(6)
        gone = self.random.sample(
            self.nodes, min(len(self.nodes), self.random.choice((0, 0, 1, self.k)))
        )
        if kind == 0:
            gone = [node for node in self.nodes if node.domain == gone[0].domain] if gone else []
        if kind == 1:
            gone = self.random.sample(self.nodes, min(len(self.nodes), self.k + 1))
        if gone:
            self.losses += 1
        for node in gone:
            self.lost.add(node.name)
            self.homes[node.name] = node.domain
            new = Node(f"node{next(self.names)}", node.domain)
            if self.reshards and len(self.nodes) > 2 and self.random.random() < 0.5:
                self.nodes.remove(node)
            else:
                self.nodes[self.nodes.index(node)] = new
        if self.reshards and len(self.nodes) < NODES and self.random.random() < 0.5:
            self.nodes.append(self.node(self.random.randrange(NODES)))

    def survives(self) -> bool:
        """Return True if the losses since the confirmed version are those that it survives."""
        domains = {self.homes[name] for name in self.lost}
        is_one_domain = len(domains) == 1 and self.losses == 1 and not self.reshards
        return len(self.lost) <= self.most or is_one_domain

    # --- training

    def train(self, step: int, left: int) -> None:
        while True:
            step += 1
            gathered = [rank.state for rank in self.ranks]
            actors = [self.save(rank, step, gathered) for rank in range(len(self.nodes))]
            # The next exchange needs all ranks; copies of the one before go on meanwhile.
            slow = self.random.choice([None, *actors])
            while actors:
                if left == 0:
                    return
                left -= 1
                running = [actor for actor in actors if actor is not slow] + self.background
                actor = self.random.choice(running or actors)
                if self.random.random() < 0.02:
                    slow = None
                if next(actor, "done") == "done":
                    (actors if actor in actors else self.background).remove(actor)
            self.check_confirmed()

    def save(self, number: int, step: int, gathered: list[State]) -> Actor:
        rank, node = self.ranks[number], self.nodes[number]
        yield
        begins = rank.generations.exchanged(gathered)
        yield from self.drop(number)
        version = Version(step, self.gang)
        for of in (number, SHARED):
            part = Part(version, of, len(self.nodes), step - 1, self.reshards)
            name = min(of, 0)  # the buffers of a node are those of its local ranks
            buffers = node.own.setdefault(name, pair())
            index = buffer_to_overwrite([each.part for each in buffers], rank.last.get(name))
            yield from self.write(node, buffers[index], part)
            rank.last[name] = part
        if begins:
            self.begin(number, version)

    def begin(self, number: int, version: Version) -> None:
        rank = self.ranks[number]
        rank.generations.begin(version)
        rank.state = State.RUNNING
        self.background.append(self.copy(number, version, rank.generations.confirmed))

    def drop(self, number: int) -> Actor:
        node, generations = self.nodes[number], self.ranks[number].generations
        here = self.rules.copies_at(self.members, self.k, node.name, self.is_sharded)
        for part in node.parts(agreement.REPLICAS):
            if self.rules.may_drop(part, here, generations):
                for each in node.copies[part.rank]:
                    if each.part == part:
                        each.part = None
                yield

    def copy(self, number: int, version: Version, keep: Version | None) -> Actor:
        """Copy a rank's part to its receivers. A fault makes it fail, or arrive too late."""
        rank, home = self.ranks[number], self.nodes[number]
        yield
        parts = [p for p in home.parts(MEMORY) if p.version == version]
        own = [part for part in parts if part.rank == number]
        if not own:
            rank.state = State.FAILED
            return
        sent = [(number, own[0])] if self.is_sharded else []
        sent += [(number, part) for part in parts if part.rank == SHARED] if self.is_sharded else []
        sent += [(to, own[0]) for to in self.rules.receivers(self.members, self.k)[number]]
        state = State.DONE
        for to, part in sent:
            fault = self.random.random() if to != number else 1.0
            if fault < 0.05:  # no connection
                state = State.FAILED
            elif fault < 0.15:  # the deadline ends before the copy arrives
                state = State.FAILED
                self.background.append(self.receive(to, part, keep, self.random.randrange(80)))
            elif self.rules.acknowledges_early:
                self.background.append(self.receive(to, part, keep, self.random.randrange(40)))
            else:
                yield from self.receive(to, part, keep, 0)
        yield
        if rank.generations.running == version:
            rank.state = state

    def receive(self, to: int, part: Part, keep: Version | None, delay: int) -> Actor:
        rank, node = self.ranks[to], self.nodes[to]
        for _ in range(delay + 1):
            yield
        while part.rank in rank.locked:
            yield
        if not rank.accepted.accepts(part):
            return
        rank.locked.add(part.rank)
        if not self.rules.names_the_confirmed:
            keep = rank.generations.confirmed
        buffers = node.copies.setdefault(part.rank, pair())
        index = self.rules.overwrites([each.part for each in buffers], keep)
        yield from self.write(node, buffers[index], part)
        rank.locked.remove(part.rank)

    def write(self, node: Node, buffer: Buffer, part: Part) -> Actor:
        if self.rules.erases_the_record:
            buffer.part = None
        yield
        buffer.content = None
        yield
        buffer.content = part
        yield
        buffer.part = part
        self.committed.add((node.name, part))
        yield

    def check_confirmed(self) -> None:
        found = [each.generations for each in self.ranks if each.generations.has_confirmed]
        newest = max((each.confirmed for each in found if each.confirmed), default=None)
        if newest is not None:
            self.check_survival(newest)
            self.safe, self.lost, self.losses = newest, set(), 0
            self.most = min(self.k, len(self.nodes) - 1)

    def check_survival(self, version: Version) -> None:
        """Check that a confirmed version survives each loss that it must."""
        domains = {node.domain for node in self.nodes}
        size = len(self.nodes)
        losses = [set(gone) for gone in itertools.combinations(range(size), min(self.k, size - 1))]
        losses += [{i for i, n in enumerate(self.nodes) if n.domain == d} for d in domains]
        # The copies of the nodes of a domain with more than half of all cannot all be elsewhere.
        losses = [gone for gone in losses if len(gone) <= min(size - 1, max(self.k, size // 2))]
        for gone in losses if self.is_sharded else ():
            left = [node for i, node in enumerate(self.nodes) if i not in gone]
            for rank in (SHARED, *range(len(self.nodes))):
                held = [
                    each.part
                    for node in left
                    for each in itertools.chain(
                        node.copies.get(rank, ()), node.own.get(min(rank, 0), ())
                    )
                    if each.part is not None and each.part == each.content
                ]
                if (version, rank) not in [(part.version, part.rank) for part in held]:
                    raise Violation("a confirmed version does not survive a loss")

    # --- restore

    def restore(self) -> int | None:
        refused: set[tuple[int, str, Part]] = set()
        while True:
            offers = [
                Offer(
                    **{
                        place: tuple(p for p in node.parts(place) if (i, place, p) not in refused)
                        for place in (MEMORY, agreement.REPLICAS)
                    }
                )
                for i, node in enumerate(self.nodes)
            ]
            plan = self.rules.decide(offers, self.is_sharded)
            sources = () if plan is None else (plan.shared, *plan.own)
            bad = {
                (reader, source.place, source.part)
                for source in sources
                for reader in source.readers
                if self.nodes[reader].content(source.place, source.part) != source.part
            }
            if not bad or not self.rules.checks_the_content:
                break
            refused |= bad
        self.check(plan, offers)
        self.gang = next_gang(offers, self.random.getrandbits(32))
        self.start(plan, offers)
        if plan is not None:
            return plan.version.step
        return 0 if self.gang >> 32 == 1 else None

    def check(self, plan: Plan | None, offers: Sequence[Offer]) -> None:
        step = -1 if plan is None else plan.version.step
        if self.safe is not None and self.is_sharded and self.survives() and step < self.safe.step:
            raise Violation("training goes back further than the confirmed version")
        if plan is None:
            return
        if self.is_sharded and not plan.own:
            raise Violation("sharded state is restored without the parts of the ranks")
        ranks = plan.shared.part.ranks
        if plan.own and not self.reshards and ranks != len(self.nodes):
            raise Violation("parts of another number of ranks are loaded")
        if plan.own and [s.part for s in plan.own] != [
            plan.shared.part._replace(rank=rank) for rank in range(ranks)
        ]:
            raise Violation("parts of several versions or ranks are combined")
        for source in (plan.shared, *plan.own):
            for reader in source.readers:
                node = self.nodes[reader]
                if (node.name, source.part) not in self.committed:
                    raise Violation("a part is loaded that was not committed")
                if node.content(source.place, source.part) != source.part:
                    raise Violation("a part is loaded whose content is of another version")

    def start(self, plan: Plan | None, offers: Sequence[Offer]) -> None:
        """Commit the restored parts, and begin to copy them."""
        self.members = [Member(i, node.name, node.domain) for i, node in enumerate(self.nodes)]
        kept = self.rules.kept(offers, self.members, plan, self.is_sharded)
        self.ranks = [Rank(self.rules.generations(kept), self.rules.accepted()) for _ in self.nodes]
        self.background: list[Actor] = []
        needed = (kept, None if plan is None else plan.version)
        for node in self.nodes:
            for each in itertools.chain(*node.copies.values()):
                if each.part is not None and self.rules.is_stale(
                    each.part, needed, len(self.nodes), self.is_sharded
                ):
                    each.part = None
        if plan is None:
            return
        is_same_size = len(plan.own) == len(self.nodes)
        for number, node in enumerate(self.nodes):
            rank = self.ranks[number]
            for name, buffers in node.own.items():
                for each in buffers:
                    if each.part is not None and each.part.version == plan.version:
                        rank.last[name] = each.part
            own = plan.own[number : number + 1] if is_same_size else ()
            for part in (plan.shared.part, *(source.part for source in own)):
                name = min(part.rank, 0)
                buffers = node.own.setdefault(name, pair())
                if part not in (each.part for each in buffers):
                    index = buffer_to_overwrite([b.part for b in buffers], rank.last.get(name))
                    for _ in self.write(node, buffers[index], part):
                        pass
                rank.last[name] = part
            if own:
                self.begin(number, plan.version)
