"""Self-fencing: the conditions under which workers may run past a lease."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.protocol.events import LinkHeartbeat, PeerDown, PeerHeartbeat
from elasticjob_rendezvous.protocol.liveness.failure_detector import (
    LINK_SILENCE_SECONDS,
    TRUST_SECONDS,
    FailureDetector,
)
from elasticjob_rendezvous.protocol.liveness.leader_link import LeaderLink
from elasticjob_rendezvous.protocol.liveness.member_loss import KILL_SECONDS, patience_seconds
from elasticjob_rendezvous.protocol.liveness.self_fencing import REGISTER_AGAIN_SECONDS, SelfFencing
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster, seal
from elasticjob_rendezvous.protocol.replica import View
from tests.unit.rendezvous.builders import KEYS, a_member, identity

A, B, C = (identity(name) for name in "abc")
ROUND = 4
NOW = 100.0
HEARTBEAT = LINK_SILENCE_SECONDS - 0.1


class Cut:
    """Member a, whose lease has expired; without evidence by default."""

    def __init__(self, *roster: str) -> None:
        self.self_fencing = SelfFencing()
        self.leader_link = LeaderLink(A, 0.0)
        self.peers = FailureDetector()
        self.roster: Roster | None = None
        if roster:
            self.roster = seal(ROUND, [a_member(name) for name in roster], 0)

    def told(self, number: int, at: float = NOW) -> Cut:
        """Receive a message from the coordinator on the link."""
        self.leader_link.link = (B, "s1")
        self.leader_link.link_heartbeat(LinkHeartbeat(B, "s1", number), at)
        return self

    def heard(self, *members: str, at: float = NOW) -> Cut:
        """Coordinate, and receive messages from these members on their links."""
        for member in members:
            self.peers.up(PeerHeartbeat(member, "s1"), at)
        return self

    def runs(self, at: float = NOW, done: frozenset[str] = frozenset()) -> bool:
        until = self.self_fencing.live_until(ROUND, self.roster, done, self.leader_link, self.peers)
        return at < until


def test_without_evidence_workers_stop() -> None:
    assert not Cut("a", "b").runs()
    assert not Cut().runs()


@pytest.mark.parametrize(("number", "runs"), [(ROUND, True), (ROUND - 1, True), (ROUND + 1, False)])
def test_member_continues_while_its_coordinator_knows_no_newer_round(
    number: int, runs: bool
) -> None:
    assert Cut("a", "b").told(number).runs() is runs


def test_link_evidence_ends_after_one_silence_interval() -> None:
    cut = Cut("a", "b").told(ROUND)
    assert cut.runs(NOW + HEARTBEAT)
    assert not cut.runs(NOW + LINK_SILENCE_SECONDS)


def test_coordinator_continues_only_with_the_whole_gang_linked() -> None:
    assert Cut("a", "b", "c").heard(B, C).runs()
    assert not Cut("a", "b", "c").heard(B).runs()


@pytest.mark.parametrize("ago", [0.0, 1.0, 2.9])
def test_coordinator_evidence_is_as_old_as_the_oldest_heartbeat(ago: float) -> None:
    cut = Cut("a", "b", "c").heard(B, at=NOW - ago).heard(C)
    assert cut.runs(NOW - ago + HEARTBEAT)
    assert not cut.runs(NOW - ago + LINK_SILENCE_SECONDS)


def test_reading_the_evidence_does_not_renew_it() -> None:
    """Each look once began another two seconds: an isolated gang ran for too long."""
    cut = Cut("a", "b").heard(B)
    for tenth in range(29):
        assert cut.runs(NOW + tenth / 10)
    assert not cut.runs(NOW + LINK_SILENCE_SECONDS)


def test_broken_link_is_evidence_as_long_as_a_silent_one() -> None:
    cut = Cut("a", "b").heard(B)
    cut.peers.down(PeerDown(B, "s1"), View(KEYS), NOW)
    assert not cut.peers.alive(B, NOW)
    assert cut.runs(NOW + HEARTBEAT)
    assert not cut.runs(NOW + LINK_SILENCE_SECONDS)


def test_done_member_need_not_be_linked() -> None:
    assert Cut("a", "b", "c").heard(B).runs(done=frozenset({C}))


def test_last_working_member_is_treated_as_a_gang_of_one() -> None:
    cut = Cut("a", "b", "c")
    done = frozenset({B, C})
    assert not cut.runs(done=done)
    cut.self_fencing.store_refused_at = NOW
    assert cut.runs(done=done)
    assert not cut.runs(done=frozenset({B}))


def test_refusing_etcd_is_evidence_for_a_single_member() -> None:
    cut = Cut("a")
    assert not cut.runs()
    cut.self_fencing.store_refused_at = NOW
    assert cut.runs(NOW + HEARTBEAT)
    assert not cut.runs(NOW + LINK_SILENCE_SECONDS)


def test_refusing_etcd_is_no_evidence_for_one_of_several_members() -> None:
    cut = Cut("a", "b")
    cut.self_fencing.store_refused_at = NOW
    assert not cut.runs()


def test_member_forgotten_by_etcd_has_time_to_register_again() -> None:
    cut = Cut("a", "b")
    cut.self_fencing.key_lost_at = NOW
    assert cut.runs(NOW + REGISTER_AGAIN_SECONDS - 0.1)
    assert not cut.runs(NOW + REGISTER_AGAIN_SECONDS)


def test_time_to_register_again_ends_before_silent_members_count_as_stopped() -> None:
    shortest = patience_seconds(RendezvousParams(1, 4, keep_alive_seconds=2.0))
    assert shortest > REGISTER_AGAIN_SECONDS
    assert shortest >= TRUST_SECONDS + KILL_SECONDS


def test_newer_round_ends_the_evidence_at_once() -> None:
    cut = Cut("a", "b").told(ROUND)
    cut.self_fencing.key_lost_at = NOW
    assert cut.runs()
    assert not cut.told(ROUND + 1).runs()


def test_lease_is_evidence_until_its_end() -> None:
    self_fencing = SelfFencing(backed_until=NOW)
    assert self_fencing.backed(NOW - 0.1)
    assert not self_fencing.backed(NOW)


def test_lost_lease_is_no_evidence() -> None:
    """Not even on a machine that has only just started, whose clock has hardly begun."""
    self_fencing = SelfFencing(backed_until=0.9)
    self_fencing.lost_its_lease(0.5)
    assert not self_fencing.backed(0.5)
    assert self_fencing.key_lost_at == 0.5


@pytest.mark.parametrize(
    ("refused_ago", "moment"),
    [(None, False), (0.0, True), (HEARTBEAT, True), (LINK_SILENCE_SECONDS, False)],
)
def test_member_that_outlasted_an_outage_has_time_to_renew_its_lease(
    refused_ago: float | None, moment: bool
) -> None:
    """To renew its lease: that etcd answers ends the evidence that there is nobody else."""
    cut = Cut("a")
    cut.self_fencing.store_refused_at = None if refused_ago is None else NOW - refused_ago
    cut.self_fencing.store_answers(NOW)
    assert cut.self_fencing.store_refused_at is None
    assert cut.runs(NOW + REGISTER_AGAIN_SECONDS - 0.1) is moment
    assert not cut.runs(NOW + REGISTER_AGAIN_SECONDS)
