"""Members' view of the coordinator: linking, suspecting, succeeding, deposing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob_rendezvous.protocol.clock import Alarm
from elasticjob_rendezvous.protocol.effects import Link, Probe, Unlink
from elasticjob_rendezvous.protocol.events import (
    LinkDown,
    LinkHeartbeat,
    LinkQuiet,
    LinkUp,
    Probed,
    Verdict,
)
from elasticjob_rendezvous.protocol.kv import Order, Range
from elasticjob_rendezvous.protocol.liveness.failure_detector import (
    LINK_SILENCE_SECONDS,
    TRUST_SECONDS,
)
from elasticjob_rendezvous.protocol.liveness.leader_link import (
    HANDOVER_SECONDS,
    SUCCESSION_SECONDS,
    LeaderLink,
)
from elasticjob_rendezvous.protocol.replica import View
from tests.unit.rendezvous.builders import KEYS, Job, identity

A, B = identity("a"), identity("b")
LOWEST = Range(KEYS.members, prefix=True, order=Order.CREATE, limit=1)


def follower(job: Job, jitter: float = 0.0) -> LeaderLink:
    """Return the state of member b, which has read the coordinator's key and linked to it."""
    leader_link = LeaderLink(B, jitter)
    found = job.etcd.range(LOWEST)
    assert leader_link.found(found.revision, ((LOWEST, found.kvs),))
    assert leader_link.maintain(job.view(), 0.0, in_doubt=False) == [Link(A, "s1", "host-a", 7000)]
    return leader_link


def without_a(job: Job) -> View:
    return job.gone("a").view()


def test_only_a_read_for_the_lowest_session_determines_the_coordinator() -> None:
    job = Job("a", "b")
    leader_link = LeaderLink(B, 0.0)
    everything = Range(KEYS.members, prefix=True)
    assert not leader_link.found(9, ((everything, job.etcd.range(everything).kvs),))
    assert leader_link.key == ""
    leader_link = follower(job)
    assert leader_link.key == job.stored("a").key
    assert leader_link.seen_at == job.etcd.revision


def test_without_members_there_is_no_coordinator() -> None:
    leader_link = LeaderLink(B, 0.0)
    assert leader_link.found(5, ((LOWEST, ()),))
    assert leader_link.key == ""


def test_malformed_records_are_skipped_and_more_are_requested() -> None:
    job = Job("a", "b")
    found = job.etcd.range(LOWEST)
    leader_link = LeaderLink(B, 0.0)
    spoiled = {kv.key for kv in found.kvs}
    assert leader_link.found(found.revision, ((LOWEST, found.kvs),), spoiled)
    assert leader_link.key == ""
    assert leader_link.read_due(0.0, Alarm()), "it is one of those that were not asked for"
    more = replace(LOWEST, limit=2)
    leader_link.found(found.revision, ((more, job.etcd.range(more).kvs),), spoiled)
    assert leader_link.key == job.stored("b").key
    assert not leader_link.read_due(100.0, Alarm())
    leader_link.found(found.revision, ((more, found.kvs),), spoiled)
    assert not leader_link.read_due(100.0, Alarm()), "there are no others"


def test_one_link_to_one_coordinator() -> None:
    job = Job("a", "b")
    leader_link = follower(job)
    assert leader_link.maintain(job.view(), 1.0, in_doubt=False) == []
    assert leader_link.unlink(50.0) == [Unlink()]
    assert leader_link.unlink(50.0) == []


def test_coordinator_with_a_new_session_is_linked_again() -> None:
    job = Job("a", "b")
    leader_link = follower(job)
    job.gone("a").member("a", session="s2")
    leader_link.key = job.stored("a").key
    assert leader_link.maintain(job.view(), 1.0, in_doubt=False) == [Link(A, "s2", "host-a", 7000)]


# -- succession -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successor", "jitter", "delay"),
    [("b", 0.5, 0.0), ("c", 0.0, SUCCESSION_SECONDS), ("c", 0.5, SUCCESSION_SECONDS * 1.5)],
)
def test_named_successor_reads_at_once_and_others_later(
    successor: str, jitter: float, delay: float
) -> None:
    job = Job("a", "b", "c").round(1, successor=identity(successor))
    leader_link = follower(job, jitter)
    view = without_a(job)
    assert leader_link.maintain(view, 50.0, in_doubt=False) == [Unlink()]
    alarm = Alarm()
    if delay:
        assert not leader_link.read_due(50.0 + delay - 0.001, alarm)
        assert alarm.at == pytest.approx(50.0 + delay)
    assert leader_link.read_due(50.0 + delay, alarm)
    found = job.etcd.range(LOWEST)
    leader_link.found(found.revision, ((LOWEST, found.kvs),))
    assert leader_link.key == job.stored("b").key
    assert not leader_link.read_due(99.0, alarm)


def test_key_not_yet_read_is_not_gone() -> None:
    job = Job("a", "b")
    leader_link = follower(job)
    assert leader_link.maintain(without_a(job), 50.0, in_doubt=True) == []
    assert leader_link.key


def test_vanished_coordinator_is_unknown() -> None:
    """Looking again later puts nothing off."""
    job = Job("a", "b", "c").round(1, successor=identity("c"))
    leader_link = follower(job)
    view = without_a(job)
    leader_link.maintain(view, 50.0, in_doubt=False)
    assert leader_link.key == ""
    assert leader_link.maintain(view, 50.2, in_doubt=False) == []
    assert leader_link.read_due(50.0 + SUCCESSION_SECONDS, Alarm())


# -- the link -------------------------------------------------------------------------


def down(member: str = A, session: str = "s1", refused: bool = False) -> LinkDown:
    return LinkDown(member, session, refused)


def test_broken_link_probes_the_launcher_once() -> None:
    job = Job("a", "b").round(4)
    leader_link = follower(job)
    assert leader_link.link_down(down(), job.view()) == [
        Probe(A, "s1", "host-a", 7000, 7001, round=4)
    ]
    assert leader_link.link_down(down(), job.view()) == []


def test_probe_before_the_first_round_carries_round_zero() -> None:
    job = Job("a", "b")
    assert follower(job).link_down(down(), job.view()) == [
        Probe(A, "s1", "host-a", 7000, 7001, round=0)
    ]


@pytest.mark.parametrize("news", [LinkUp(A, "s1"), Probed(A, "s1", Verdict.UNKNOWN)])
def test_answer_or_new_link_allows_another_probe(news: LinkUp | Probed) -> None:
    job = Job("a", "b")
    leader_link = follower(job)
    leader_link.link_down(down(), job.view())
    if isinstance(news, LinkUp):
        leader_link.link_up(news, 1.0)
    else:
        leader_link.probed(news, 1.0)
    assert leader_link.link_down(down(), job.view()) != []


@pytest.mark.parametrize("news", [LinkQuiet(A, "s1"), LinkDown(A, "s1", refused=False)])
@pytest.mark.parametrize("successor", [B, identity("c")])
def test_only_the_successor_probes_a_silent_coordinator(
    news: LinkQuiet | LinkDown, successor: str
) -> None:
    job = Job("a", "b", "c").round(4, successor=successor)
    found = follower(job).suspected(news, job.view())
    assert (found is not None and found.id == A) is (successor == B)


def test_other_link_or_coordinator_without_key_is_not_suspected() -> None:
    job = Job("a", "b").round(4, successor=B)
    leader_link = follower(job)
    assert leader_link.suspected(LinkQuiet(A, "s0"), job.view()) is None
    assert leader_link.suspected(LinkQuiet(A, "s1"), without_a(job)) is None


def test_other_links_and_vanished_coordinators_are_not_probed() -> None:
    job = Job("a", "b")
    leader_link = follower(job)
    assert leader_link.link_down(down(session="s0"), job.view()) == []
    assert leader_link.link_down(down(member=B), job.view()) == []
    assert leader_link.link_down(down(), without_a(job)) == []


# -- deposing -------------------------------------------------------------------------


def test_only_proof_deposes_the_coordinator() -> None:
    job = Job("a", "b").round(1, successor=B)
    leader_link = follower(job)
    view = job.view()
    for verdict in (Verdict.UNKNOWN, Verdict.AGENT_ALIVE):
        leader_link.probed(Probed(A, "s1", verdict), 50.0)
        assert leader_link.to_depose(view, 99.0, Alarm()) is None
    leader_link.probed(Probed(A, "s1", Verdict.GONE), 50.0)
    assert leader_link.to_depose(view, 50.0, Alarm()) == view.member(A)


def test_coordinator_without_agent_is_replaced_while_its_workers_live() -> None:
    job = Job("a", "b").round(1, successor=B)
    leader_link = follower(job)
    leader_link.probed(Probed(A, "s1", Verdict.WORKERS_ALIVE), 50.0)
    assert leader_link.to_depose(job.view(), 50.0, Alarm()) is not None
    assert (A, "s1") in leader_link.orphaned
    assert (A, "s1") not in leader_link.proven_gone
    leader_link.probed(Probed(A, "s1", Verdict.AGENT_ALIVE), 51.0)
    assert leader_link.to_depose(job.view(), 51.0, Alarm()) is None


@pytest.mark.parametrize("news", [LinkUp(A, "s1"), Probed(A, "s1", Verdict.GONE)])
def test_orphan_is_forgotten_once_its_agent_returned_or_its_workers_ended(
    news: LinkUp | Probed,
) -> None:
    """Whoever succeeds this coordinator would keep their lease."""
    job = Job("a", "b").round(1, successor=B)
    leader_link = follower(job)
    leader_link.probed(Probed(A, "s1", Verdict.WORKERS_ALIVE), 50.0)
    if isinstance(news, LinkUp):
        leader_link.link_up(news, 51.0)
    else:
        leader_link.probed(news, 51.0)
    assert not leader_link.orphaned
    deposed = leader_link.to_depose(job.view(), 51.0, Alarm()) is not None
    assert deposed is isinstance(news, Probed)


def test_other_members_depose_later_than_the_successor() -> None:
    job = Job("a", "b", "c").round(1, successor=identity("c"))
    leader_link = follower(job)
    leader_link.probed(Probed(A, "s1", Verdict.GONE), 50.0)
    alarm = Alarm()
    assert leader_link.to_depose(job.view(), 50.0, alarm) is None
    assert alarm.at == 50.0 + SUCCESSION_SECONDS
    assert leader_link.to_depose(job.view(), alarm.at, alarm) is not None


def test_session_that_linked_again_or_was_replaced_is_not_deposed() -> None:
    job = Job("a", "b").round(1, successor=B)
    leader_link = follower(job)
    leader_link.probed(Probed(A, "s1", Verdict.GONE), 50.0)
    leader_link.link_up(LinkUp(A, "s1"), 51.0)
    assert leader_link.to_depose(job.view(), 99.0, Alarm()) is None
    leader_link.probed(Probed(A, "s1", Verdict.GONE), 52.0)
    job.gone("a").member("a", session="s2")
    leader_link.key = job.stored("a").key
    assert leader_link.to_depose(job.view(), 99.0, Alarm()) is None


# -- evidence from the link -----------------------------------------------------------


def test_link_is_evidence_for_the_reported_round_and_newer() -> None:
    leader_link = follower(Job("a", "b"))
    assert leader_link.evidence_until(3) <= 50.0
    leader_link.link_heartbeat(LinkHeartbeat(A, "s1", 3), 50.0)
    assert leader_link.evidence_until(3) > 50.0
    assert leader_link.evidence_until(2) <= 50.0
    assert leader_link.has_newer_round(2)
    assert not leader_link.has_newer_round(3)


def test_link_is_evidence_for_the_first_round() -> None:
    leader_link = follower(Job("a", "b"))
    leader_link.link_heartbeat(LinkHeartbeat(A, "s1", 1, sent=50.0), 50.0)
    assert leader_link.evidence_until(1) == pytest.approx(50.0 + TRUST_SECONDS)


def test_link_evidence_lasts_from_last_exchange_in_both_directions() -> None:
    """A side that receives nothing counts the link as silent, and continues without the other."""
    leader_link = follower(Job("a", "b"))
    leader_link.link_heartbeat(LinkHeartbeat(A, "s1", 3, sent=48.0), 50.0)
    assert leader_link.evidence_until(3) > 48.0 + TRUST_SECONDS - 0.1
    assert leader_link.evidence_until(3) <= 48.0 + TRUST_SECONDS


@pytest.mark.parametrize(
    ("vouched", "seconds"), [(1.2, 1.2), (0.0, 0.0), (60.0, TRUST_SECONDS), (None, TRUST_SECONDS)]
)
def test_link_evidence_ends_with_the_evidence_of_the_coordinator(
    vouched: float | None, seconds: float
) -> None:
    """The coordinator may hang before that and then stays silent. Older ones do not report it."""
    leader_link = follower(Job("a", "b"))
    leader_link.link_heartbeat(LinkHeartbeat(A, "s1", 3, 49.0, vouched), 50.0)
    assert leader_link.evidence_until(3) == pytest.approx(49.0 + seconds)
    leader_link.link_heartbeat(LinkHeartbeat(A, "s1", 3, 49.5, 0.1), 50.5)
    assert leader_link.evidence_until(3) == pytest.approx(max(49.0 + seconds, 49.6))


def test_link_evidence_outlasts_replacement_of_the_link() -> None:
    """Another member coordinates after an outage of etcd, and a lease may not be renewed yet."""
    job = Job("a", "b", "c")
    leader_link = follower(job)
    leader_link.link_heartbeat(LinkHeartbeat(A, "s1", 3, sent=49.0), 50.0)
    assert leader_link.unlink(51.0) == [Unlink()]
    assert leader_link.evidence_until(3) > 51.0 + HANDOVER_SECONDS - 0.1
    assert leader_link.evidence_until(3) <= 51.0 + HANDOVER_SECONDS
    assert leader_link.evidence_until(2) <= 51.1


@pytest.mark.parametrize("session", [None, "s2"], ids=["its key is gone", "in a new session"])
def test_link_evidence_outlasts_the_session_of_the_coordinator(session: str | None) -> None:
    job = Job("a", "b", "c")
    leader_link = follower(job)
    leader_link.link_heartbeat(LinkHeartbeat(A, "s1", 3, sent=50.0), 50.0)
    job.gone("a")
    if session is not None:
        job.member("a", session=session)
        leader_link.key = job.stored("a").key
    assert leader_link.maintain(job.view(), 51.0, in_doubt=False) != []
    assert leader_link.link == (None if session is None else (A, "s2"))
    assert leader_link.evidence_until(3) == pytest.approx(51.0 + HANDOVER_SECONDS)


def test_kept_link_evidence_does_not_exceed_its_original_end() -> None:
    leader_link = follower(Job("a", "b", "c"))
    leader_link.link_heartbeat(LinkHeartbeat(A, "s1", 3, sent=50.0), 50.0)
    leader_link.unlink(49.9 + TRUST_SECONDS)
    assert leader_link.evidence_until(3) <= 50.0 + TRUST_SECONDS


def test_link_without_a_round_number_is_no_evidence() -> None:
    leader_link = follower(Job("a", "b"))
    leader_link.link_up(LinkUp(A, "s1"), 50.0)
    assert leader_link.evidence_until(3) <= 50.0
    leader_link.link_heartbeat(LinkHeartbeat(A, "s1", 0), 50.0)
    assert leader_link.evidence_until(3) <= 50.0


def test_opened_link_is_as_good_as_a_heartbeat() -> None:
    """Both sides spoke to make it, so it carried both ways half a second ago."""
    leader_link = follower(Job("a", "b"))
    leader_link.link_up(LinkUp(A, "s1"), 50.0)
    leader_link.link_heartbeat(LinkHeartbeat(A, "s1", 3, sent=48.0), 50.0)
    assert leader_link.evidence_until(3) == pytest.approx(50.0 + LINK_SILENCE_SECONDS)


def test_other_opened_link_does_not_change_the_evidence() -> None:
    leader_link = follower(Job("a", "b"))
    leader_link.link_heartbeat(LinkHeartbeat(A, "s1", 3, sent=50.0), 50.0)
    leader_link.link_up(LinkUp(A, "s0"), 50.5)
    assert leader_link.evidence_until(3) == pytest.approx(50.0 + TRUST_SECONDS)


def test_silent_broken_or_foreign_link_is_no_evidence() -> None:
    job = Job("a", "b")
    leader_link = follower(job)
    leader_link.link_heartbeat(LinkHeartbeat(A, "s1", 3), 50.0)
    assert leader_link.evidence_until(3) > 50.0 + LINK_SILENCE_SECONDS - 0.1
    assert leader_link.evidence_until(3) <= 50.0 + LINK_SILENCE_SECONDS
    leader_link.link_down(down(), job.view())
    assert leader_link.evidence_until(3) <= 50.1
    leader_link.link_heartbeat(LinkHeartbeat(A, "s0", 3), 50.0)
    assert leader_link.evidence_until(3) <= 50.1
