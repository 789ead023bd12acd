"""Leave notices on links: senders, retention and purpose."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob_launcher.proof import BadPeer
from elasticjob_rendezvous.links import wire
from elasticjob_rendezvous.protocol.config import Config, Identity
from elasticjob_rendezvous.protocol.effects import Read, SendLeaveNotices, Write
from elasticjob_rendezvous.protocol.events import LeaveNoticesReceived, LocalChanged
from elasticjob_rendezvous.protocol.liveness import leave_notices
from elasticjob_rendezvous.protocol.liveness.failure_detector import FailureDetector
from elasticjob_rendezvous.protocol.records.members import (
    CauseKind,
    LeaveNotice,
    MemberState,
    cause_with_reasons,
)
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.state import EngineState
from elasticjob_rendezvous.protocol.worker_group import Workers
from tests.sim.etcd.simulated_etcd import SimEtcd
from tests.unit.rendezvous.builders import Job, identity
from tests.unit.rendezvous.node import READY, Node
from tests.unit.rendezvous.protocol.coordinator.test_charging import aborted
from tests.unit.rendezvous.protocol.coordinator.test_round_end import Round

A, B, C = identity("a"), identity("b"), identity("c")
BY_B = (LeaveNotice(B, "n-b", "drained"),)
DRAINED = (LeaveNotice(B, "", "drained"),)
"""Notice from the agent of the session `s1`."""


@pytest.fixture
def pair() -> tuple[Node, Node]:
    """Return a, which coordinates, and b, in a final round; neither has started its workers."""
    etcd, bounds = SimEtcd(), RendezvousParams(1, 2, last_call_seconds=1.0)
    a, b = Node(etcd, "a", bounds=bounds).start(), Node(etcd, "b", bounds=bounds).start()
    for _ in range(30):
        a.later(0.1)
        b.later(0.1)
    assert a.engine.coordinator.active
    return a, b


# -- sending ---------------------------------------------------------------------------


def test_leaving_member_sends_a_leave_notice_on_its_links(pair: tuple[Node, Node]) -> None:
    _, b = pair
    b.held = True
    local = replace(READY, workers=Workers.RUNNING, round=1)
    b.hear(LocalChanged(local)).hear(LocalChanged(replace(local, leaving="drained")))
    assert b.made(SendLeaveNotices) == [SendLeaveNotices(BY_B)], "once"


def test_coordinator_forwards_leave_notices(pair: tuple[Node, Node]) -> None:
    """The coordinator's successor may have no other source. No other state changes."""
    a, _ = pair
    before = len(a.made(Read | Write))
    a.hear(LeaveNoticesReceived(BY_B)).hear(LeaveNoticesReceived(BY_B))
    assert a.made(SendLeaveNotices) == [SendLeaveNotices(BY_B)]
    assert len(a.made(Read | Write)) == before


def test_other_members_do_not_forward_leave_notices(pair: tuple[Node, Node]) -> None:
    _, b = pair
    b.hear(LeaveNoticesReceived((LeaveNotice(A, "n-a", "drained"),)))
    assert not b.made(SendLeaveNotices)
    assert b.engine.view.leave_notices[A].reason == "drained"


@pytest.mark.parametrize(
    ("active", "served", "passed_on"),
    [(True, -1, True), (True, 1, True), (False, 1, True), (False, -1, False)],
    ids=["it coordinates", "for long", "it did until now", "it never did"],
)
def test_former_coordinator_forwards_leave_notices_while_links_last(
    active: bool, served: int, passed_on: bool
) -> None:
    """Links to a former coordinator stand for a moment, and nobody else may have heard of it."""
    engine_state = EngineState(Config("/prefix/", Identity(A, "a", "host-a", 7000), "n-a"))
    engine_state.coordinator.active, engine_state.served = active, served
    assert leave_notices.receive(engine_state, LeaveNoticesReceived(BY_B)) == (
        [SendLeaveNotices(BY_B)] if passed_on else []
    )


def test_next_round_drops_leave_notices_of_other_members(pair: tuple[Node, Node]) -> None:
    _, b = pair
    b.hear(
        LeaveNoticesReceived(
            (LeaveNotice(C, "n-c", "x"), LeaveNotice(A, "n-a", "x"), LeaveNotice(B, "old", "x"))
        )
    )
    b.engine._state.rounds.last = None  # as if the round became final only now
    b.later(0.1)
    assert set(b.engine.view.leave_notices) == {A}


# -- retention -------------------------------------------------------------------------


def test_leave_notice_counts_once_the_key_is_gone() -> None:
    job = Job("a", "b")
    view = job.view()
    view.merge_leave_notices(DRAINED)
    assert view.leaves(B) is None
    job.gone("b")
    assert job.view().leaves(B) == "drained"
    assert view.leaves(A) is None


def test_member_key_precedes_leave_notice() -> None:
    job = Job("a", "b")
    job.view().merge_leave_notices(DRAINED)
    job.change("b", state=MemberState.LEAVING, reason="scaled down").gone("b")
    assert job.view().leaves(B) == "scaled down"


@pytest.mark.parametrize(
    ("state", "reason"), [(MemberState.WAITING, None), (MemberState.LEAVING, "drained")]
)
def test_new_registration_replaces_leave_notice(state: MemberState, reason: str | None) -> None:
    job = Job("a", "b")
    job.view().merge_leave_notices(DRAINED)
    job.gone("b").member("b", session="m-b-1", state=state, reason=reason or "").view()
    job.gone("b")
    assert job.view().leaves(B) == reason


def test_leave_notice_of_an_earlier_agent_is_ignored() -> None:
    """A link may repeat it after another agent of the member has registered."""
    job = Job("a", "b")
    job.view().merge_leave_notices((LeaveNotice(B, "earlier", "drained"),))
    assert not job.view().leave_notices


def test_late_write_of_leaving_member_keeps_leave_notice() -> None:
    """The write was under way before the member decided to leave."""
    job = Job("a", "b")
    job.view().merge_leave_notices(DRAINED)
    job.change("b", state=MemberState.RUNNING, round=1).view()
    job.gone("b")
    assert job.view().leaves(B) == "drained"


# -- purpose ---------------------------------------------------------------------------


def test_member_with_leave_notice_is_not_lost() -> None:
    """The leaver's peers may be stuck in collectives by now: they are stopped without grace."""
    round = Round()
    round.job.view().merge_leave_notices(DRAINED)
    assert round.seen(60) is None
    round.job.gone("b")
    assert round.seen() is None, "others may leave with it"
    assert round.look_after(0.1).cause == cause_with_reasons(
        CauseKind.LEAVE, ("b",), ["drained"], urgent=True
    )


def test_member_that_stopped_because_others_left_is_not_lost() -> None:
    """A gang that is not complete cannot outlive etcd."""
    round = Round()
    round.job.view().merge_leave_notices(DRAINED)
    round.job.change("c", state=MemberState.WAITING, round=1).gone("b")
    round.seen()
    assert round.seen(0.1) == (CauseKind.LEAVE, ("b",))


def test_loss_beside_a_leave_is_reported() -> None:
    round = Round()
    round.job.view().merge_leave_notices(DRAINED)
    round.job.gone("b", "c")
    assert round.seen() == (CauseKind.LOSS, ("c",))


def test_leave_notice_prevents_charge_of_peers() -> None:
    job = aborted()
    job.view().merge_leave_notices((LeaveNotice(C, "", "drained"),))
    current = job.gone("c").act()
    assert (current.charged, current.pending) == ((), ())
    assert (current.cause.kind, current.cause.members) == (CauseKind.LEAVE, ("c",))


def test_member_that_returned_after_others_left_was_not_lost() -> None:
    job = aborted()
    job.view().merge_leave_notices((LeaveNotice(C, "", "drained"),))
    job.gone("b", "c").member("b", session="s2", round=1)
    assert job.act().cause.members == ("c",)


def test_leave_notice_does_not_prove_stopped_workers() -> None:
    """The leaver's workers are probed before the next round begins."""
    job = Job("a", "b").sealed("a", "b")
    job.view().merge_leave_notices(DRAINED)
    job.gone("b")
    peers = job.coordinator.peers
    assert isinstance(peers, FailureDetector)
    assert job.view().departed[B].state is MemberState.RUNNING


def test_recorded_leave_with_removed_key_gives_grace() -> None:
    """The leaver's peers were notified in time: they may save."""
    round = Round()
    round.job.view().merge_leave_notices(DRAINED)
    round.job.change("b", state=MemberState.LEAVING, reason="drained", stopped=True)
    round.seen()
    round.job.gone("b")
    assert round.look_after(0.1).cause == cause_with_reasons(CauseKind.LEAVE, ("b",), ["drained"])


# -- on the wire -----------------------------------------------------------------------


def test_line_of_leave_notices_is_bounded() -> None:
    many = tuple(LeaveNotice(f"{number:032d}", "n", "\u20ac" * 1000) for number in range(1000))
    message = wire.leaving_line(many)
    assert 2 < len(message["leaving"]) < 20
    assert len(wire.line({"round": 2**40, **message})) < wire.MAX_LINE_BYTES
    assert [said.id for said in wire.read_leaving(message)] == list(message["leaving"])
    assert wire.read_leaving(message)[0] == replace(many[0], reason="\u20ac" * 100)


def test_own_leave_notice_precedes_all_others(pair: tuple[Node, Node]) -> None:
    """No other member can pass it on."""
    a, _ = pair
    a.hear(
        LeaveNoticesReceived(
            tuple(LeaveNotice(f"{number:036d}", "n", "why") for number in range(100))
        )
    )
    a.held = True
    local = replace(READY, workers=Workers.RUNNING, round=1)
    a.hear(LocalChanged(local)).hear(LocalChanged(replace(local, leaving="drained")))
    assert next(iter(wire.leaving_line(a.made(SendLeaveNotices)[-1].leaving)["leaving"])) == A


@pytest.mark.parametrize("told", [None, 7, [], "b", {"b": 7}, {"b": ["n"]}, {"b": ["n", None]}])
def test_malformed_leave_notice_is_refused(told: object) -> None:
    with pytest.raises(BadPeer, match="Malformed"):
        wire.read_leaving({"leaving": told})
    assert wire.read_leaving({}) == ()
