"""Model test: any interleaving of any nodes on one state keeps the invariants and terminates.

The nodes decide on copies of the state that may be old, write by compare-and-set, die, and have
clocks that differ by hours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticjob_rendezvous.dynamic.core import decisions
from elasticjob_rendezvous.dynamic.core.decisions import Action, Situation, applied
from elasticjob_rendezvous.dynamic.core.liveness import Memory, dead, observe
from elasticjob_rendezvous.dynamic.core.state import (
    NodeDesc,
    RankAssignment,
    State,
    assignment,
    nodes_waiting,
    without,
)
from tests.unit.rendezvous.dynamic import builders
from tests.unit.rendezvous.dynamic.builders import UTC_NOW

MIN, MAX, MEMBERS = 2, 3, 5
SETTINGS = builders.settings(MIN, MAX, last_call_seconds=5, interval_seconds=2)
_WRITES = (
    Action.KEEP_ALIVE,
    Action.ADD_TO_PARTICIPANTS,
    Action.ADD_TO_WAIT_LIST,
    Action.ADD_TO_REDUNDANCY_LIST,
    Action.REJOIN,
    Action.REMOVE,
    Action.MARK_COMPLETE,
    Action.MARK_CLOSED,
)


@dataclass
class Member:
    """Node, its old copy of the state, and its operation: join, rejoin, leave or run."""

    node: NodeDesc
    skew_seconds: int
    state: State = field(default_factory=State)
    token: int = -1
    memory: Memory = field(default_factory=Memory)
    beat_at: float = float("-inf")
    doing: str = "leave"
    held: RankAssignment | None = None
    alive: bool = True


@dataclass
class World:
    """Store with all its users. It records the seats taken."""

    members: list[Member]
    now: float = 0.0
    stored: State | None = None
    token: int = 0
    seats: dict[int, list[tuple[NodeDesc, RankAssignment]]] = field(default_factory=dict)

    def read(self, member: Member) -> None:
        state = self.stored or State()
        utc = self.utc(member)
        member.memory = observe(member.memory, state, SETTINGS, self.now, utc)
        gone = dead(member.memory, SETTINGS) - {member.node}
        member.state, member.token = without(state, gone, SETTINGS), self.token

    def utc(self, member: Member) -> datetime:
        return UTC_NOW + timedelta(seconds=self.now + member.skew_seconds)

    def act(self, member: Member) -> None:
        """Make one decision on the member's copy, however old, and its write."""
        if member.doing == "run":
            if nodes_waiting(member.state, member.held, SETTINGS):
                member.doing, member.held = "rejoin", None
                return
            decide = decisions.keep_alive
        else:
            decide = decisions.leave if member.doing == "leave" else decisions.join
        call = member.memory.last_call
        situation = Situation(
            member.node,
            member.state,
            SETTINGS,
            self.now,
            self.utc(member),
            deadline=float("inf"),
            beat_due=self.now - member.beat_at >= SETTINGS.interval_seconds * 0.9,
            last_call_over=call is not None and self.now >= call.ends,
            rejoins=member.doing == "rejoin",
        )
        action = decide(situation)
        if action in _WRITES:
            self.write(member, action, applied(action, situation))
        elif action is Action.FINISH and member.doing == "leave":
            member.doing = "join"
        elif action is Action.FINISH and member.doing in ("join", "rejoin"):
            self.sit(member)

    def write(self, member: Member, action: Action, state: State) -> None:
        if member.token == self.token:
            before = self.stored or State()
            assert state.round in (before.round, before.round + 1)
            if state.complete:
                assert sorted(set(state.participants.values())) == sorted(
                    state.participants.values()
                )
                assert len(state.participants) <= MAX
            assert state.wait_list.isdisjoint(state.participants)
            assert state.redundancy_list.isdisjoint(state.participants)
            assert state.redundancy_list.isdisjoint(state.wait_list)
            self.stored, self.token = state, self.token + 1
            if action is not Action.REMOVE:
                member.beat_at = self.now
            if member.doing == "rejoin":
                member.doing = "join"
        self.read(member)

    def sit(self, member: Member) -> None:
        taken = assignment(member.state, member.node)
        assert taken is not None
        assert MIN <= len(taken.roster) <= MAX
        for node, other in self.seats.setdefault(taken.round, []):
            assert other.roster == taken.roster, "two memberships of one round"
            assert (other.rank == taken.rank) == (node == member.node)
        self.seats[taken.round].append((member.node, taken))
        member.doing, member.held = "run", taken


def world(skews: list[int]) -> World:
    return World([Member(NodeDesc(f"n{i}", 1, 0), skew) for i, skew in enumerate(skews)])


skews = st.lists(st.sampled_from([-7200, -3, 0, 3, 7200]), min_size=MEMBERS, max_size=MEMBERS)
steps = st.lists(
    st.tuples(
        st.integers(0, MEMBERS - 1),
        st.sampled_from(["read", "act", "act", "both", "both", "both", "restart", "leave", "die"]),
        st.sampled_from([0.0, 0.0, 0.1, 1.0, 3.0]),
    ),
    max_size=150,
)


@settings(max_examples=300, deadline=None)
@given(skews, steps)
def test_members_agree_on_each_round_and_reach_the_end(skews: list[int], steps: list) -> None:
    w = world(skews)
    for index, what, seconds in steps:
        w.now += seconds
        member = w.members[index]
        if not member.alive:
            continue
        match what:
            case "die":
                member.alive = sum(m.alive for m in w.members) <= MIN
            case "restart" | "leave" if member.doing == "run":
                member.doing, member.held = ("rejoin" if what == "restart" else "leave"), None
            case "read" | "both":
                w.read(member)
        if what in ("act", "both"):
            w.act(member)
    settle(w)


def settle(w: World) -> None:
    """Let all living members, without further deaths, settle in one round, up to MAX."""
    living = [member for member in w.members if member.alive]
    for _ in range(400):
        w.now += 0.25
        for member in living:
            w.read(member)
            w.act(member)
        running = [m for m in living if m.held]
        if len(running) == min(MAX, len(living)) and is_quiet(w, running):
            return
    raise AssertionError([(m.node, m.doing, m.held) for m in living] + [w.stored])


def is_quiet(w: World, running: list[Member]) -> bool:
    for member in running:
        w.read(member)
    rosters = {tuple(m.held.roster) for m in running if m.held}
    return len(rosters) == 1 and not any(nodes_waiting(m.state, m.held, SETTINGS) for m in running)
