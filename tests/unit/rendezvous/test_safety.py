"""Whether workers may go on past a lease."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.core.events import LinkHeard, PeerHeard
from elasticjob_rendezvous.core.leadership import Leadership
from elasticjob_rendezvous.core.peers import LINK_SILENCE_SECONDS, Peers
from elasticjob_rendezvous.core.records import Roster
from elasticjob_rendezvous.core.roster import seal
from elasticjob_rendezvous.core.safety import REGISTER_AGAIN_SECONDS, Safety
from tests.unit.rendezvous.builders import a_member, identity

A, B, C = (identity(name) for name in "abc")
ROUND = 4
NOW = 100.0
HEARD = LINK_SILENCE_SECONDS - 0.1


class Cut:
    """Member a, whose lease is over; it has no evidence until told otherwise."""

    def __init__(self, *roster: str) -> None:
        self.safety = Safety()
        self.leadership = Leadership(A, 0.0)
        self.peers = Peers()
        self.roster: Roster | None = None
        if roster:
            self.roster = seal(ROUND, [a_member(name) for name in roster], 0)

    def told(self, number: int, at: float = NOW) -> Cut:
        """The coordinator spoke on our link."""
        self.leadership.link = (B, "s1")
        self.leadership.link_heard(LinkHeard(B, "s1", number), at)
        return self

    def heard(self, *members: str, at: float = NOW) -> Cut:
        """We coordinate, and these spoke on their links."""
        for member in members:
            self.peers.up(PeerHeard(member, "s1"), at)
        return self

    def runs(self, at: float = NOW, done: frozenset[str] = frozenset()) -> bool:
        return self.safety.may_run(ROUND, self.roster, done, self.leadership, self.peers, at)


def test_without_evidence_nothing_runs() -> None:
    assert not Cut("a", "b").runs()
    assert not Cut().runs()


@pytest.mark.parametrize(("number", "runs"), [(ROUND, True), (ROUND - 1, True), (ROUND + 1, False)])
def test_a_member_runs_on_while_its_coordinator_knows_no_newer_round(
    number: int, runs: bool
) -> None:
    assert Cut("a", "b").told(number).runs() is runs


def test_one_silence_ends_what_a_link_proved() -> None:
    cut = Cut("a", "b").told(ROUND)
    assert cut.runs(NOW + HEARD)
    assert not cut.runs(NOW + HEARD + REGISTER_AGAIN_SECONDS)


def test_a_coordinator_runs_on_only_with_the_whole_gang_linked() -> None:
    assert Cut("a", "b", "c").heard(B, C).runs()
    assert not Cut("a", "b", "c").heard(B).runs()
    assert not Cut("a", "b", "c").heard(B, C, at=NOW - LINK_SILENCE_SECONDS).runs()


def test_a_member_that_is_done_need_not_be_linked() -> None:
    assert Cut("a", "b", "c").heard(B).runs(done=frozenset({C}))


def test_alone_only_an_etcd_that_refuses_proves_anything() -> None:
    cut = Cut("a")
    assert not cut.runs()
    cut.safety.store_refused_at = NOW
    assert cut.runs(NOW + HEARD)
    assert not cut.runs(NOW + HEARD + REGISTER_AGAIN_SECONDS)


def test_an_etcd_that_refuses_proves_nothing_for_one_of_several() -> None:
    cut = Cut("a", "b")
    cut.safety.store_refused_at = NOW
    assert not cut.runs()


def test_proof_lasts_for_as_long_as_a_gang_takes_to_register_again() -> None:
    cut = Cut("a", "b", "c").heard(B, C)
    assert cut.runs()
    cut.peers.linked.clear()
    assert cut.runs(NOW + REGISTER_AGAIN_SECONDS - 0.1)
    assert not cut.runs(NOW + REGISTER_AGAIN_SECONDS)


def test_a_newer_round_ends_it_at_once() -> None:
    cut = Cut("a", "b").told(ROUND)
    assert cut.runs()
    assert not cut.told(ROUND + 1).runs()
