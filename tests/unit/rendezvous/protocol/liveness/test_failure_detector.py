"""Coordinator's links: probes, the evidence of answers, orphans, isolation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob_rendezvous.protocol.coordinator.memory import Coordinator
from elasticjob_rendezvous.protocol.effects import Effect, KeepAlive, Note, Probe
from elasticjob_rendezvous.protocol.events import (
    PeerDown,
    PeerHeartbeat,
    PeerQuiet,
    PeerUp,
    Probed,
    Verdict,
)
from elasticjob_rendezvous.protocol.liveness import detector_upkeep
from elasticjob_rendezvous.protocol.liveness.failure_detector import (
    COUNTS_AS_ALIVE_SECONDS,
    LINK_SILENCE_SECONDS,
    MISSED_SECONDS,
    FailureDetector,
    gone_keys,
)
from elasticjob_rendezvous.protocol.liveness.peer_state import LinkState, MemberEvent
from elasticjob_rendezvous.protocol.liveness.probes import (
    LONGEST_PROBE_SECONDS,
    PROBE_INTERVAL_SECONDS,
)
from elasticjob_rendezvous.protocol.records.members import Member, MemberState, RoundState
from elasticjob_rendezvous.protocol.replica import Versioned
from tests.unit.rendezvous.builders import KEYS, Job, identity, inquiries

A, B, C, D = (identity(name) for name in "abcd")
ORPHAN_SECONDS = 30.0
NOT_RUNNING = [state for state in MemberState if state is not MemberState.RUNNING]
PROBE_B = Probe(B, "s1", "host-b", 7000, 7001, round=1)


def gang() -> Job:
    return Job("a", "b", "c").sealed("a", "b", "c").change("b", lease=77)


def linked(*members: str, at: float = 0.0) -> FailureDetector:
    """Return a detector after the probes of unlinked members in round 1."""
    peers = FailureDetector(probed_round=1)
    for member in members:
        peers.up(PeerUp(member, "s1"), at)
    return peers


def probed(peers: FailureDetector, job: Job, verdict: Verdict, now: float = 1.0) -> list[Effect]:
    return peers.probed(Probed(B, "s1", verdict), job.view(), now, ORPHAN_SECONDS)


def probed_gone(peers: FailureDetector, job: Job, now: float) -> list[Versioned[Member]]:
    """Return the keys that are gone after a probe of b was refused."""
    probed(peers, job, Verdict.GONE, now)
    return gone_keys(peers, job.view().members())


def granted(peers: FailureDetector) -> dict[str, float]:
    """Return the latest time until which we let each member's workers live."""
    return {id: peer.granted for id, peer in peers.states.items() if peer.granted is not None}


def without_notes(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, Note)]


# -- reasons for probes ---------------------------------------------------------------


def test_closed_link_triggers_a_probe() -> None:
    peers = linked(B)
    assert peers.down(PeerDown(B, "s1"), gang().view(), 5.0) == [PROBE_B]
    assert peers.symptom([B, C]) == 5.0
    assert not peers.is_gone(B, "s1")


@pytest.mark.parametrize("state", [MemberState.LEAVING, MemberState.DONE])
def test_member_that_reported_leaving_is_not_probed(state: MemberState) -> None:
    job = gang().change("b", state=state)
    assert linked(B).down(PeerDown(B, "s1"), job.view(), 5.0) == []


def test_closed_job_probes_nobody() -> None:
    job = gang().round(1, RoundState.CLOSED)
    assert linked(B).down(PeerDown(B, "s1"), job.view(), 5.0) == []


def test_relinked_member_or_member_without_key_is_not_probed() -> None:
    peers = linked(B)
    peers.up(PeerUp(B, "s2"), 4.0)
    assert peers.down(PeerDown(B, "s1"), gang().view(), 5.0) == []
    assert linked(B).down(PeerDown(B, "s1"), gang().gone("b").view(), 5.0) == []


def test_closed_unknown_link_triggers_a_probe() -> None:
    """It was given up for another of that session, or made under the coordinator before us."""
    assert linked().down(PeerDown(B, "s1"), gang().view(), 5.0) == [PROBE_B]


def test_probe_before_the_first_round_carries_round_zero() -> None:
    job = Job("a", "b")
    assert linked(B).down(PeerDown(B, "s1"), job.view(), 5.0) == [replace(PROBE_B, round=0)]


def test_member_with_closed_link_is_probed_again_later() -> None:
    job, peers = gang(), linked(B)
    peers.down(PeerDown(B, "s1"), job.view(), 5.0)
    assert tended(peers, job, 5.0) == []
    assert wake(peers, job, 5.0) == 5.0 + PROBE_INTERVAL_SECONDS
    assert tended(peers, job, 5.0 + PROBE_INTERVAL_SECONDS) == [PROBE_B]


def test_new_link_clears_the_suspicion_of_its_member() -> None:
    """The next trouble is counted from its own first sign."""
    job, peers = gang(), linked(B)
    peers.down(PeerDown(B, "s1"), job.view(), 5.0)
    peers.up(PeerUp(B, "s1"), 6.0)
    assert peers.symptom([B]) is None
    peers.down(PeerDown(B, "s1"), job.view(), 9.0)
    assert peers.symptom([B]) == 9.0


def test_late_heartbeat_does_not_restore_a_closed_link() -> None:
    job, peers = gang(), linked(B)
    peers.down(PeerDown(B, "s1"), job.view(), 5.0)
    peers.up(PeerHeartbeat(B, "s1"), 5.1)
    assert peers.symptom([B]) == 5.0


def test_trouble_counts_from_its_first_sign() -> None:
    job, peers = gang(), linked(B)
    peers.down(PeerDown(B, "s1"), job.view(), 5.0)
    peers.down(PeerDown(B, "s1"), job.view(), 6.0)
    assert peers.symptom([B, C]) == 5.0
    peers.down(PeerDown(C, "s1"), job.view(), 7.0)
    assert peers.symptom([C, B]) == 5.0
    assert peers.symptom([C]) == 7.0


# -- evidence of answers --------------------------------------------------------------


def test_gone_is_proof_for_its_session_only() -> None:
    job, peers = gang(), linked()
    probed(peers, job, Verdict.GONE)
    assert [gone.record.name for gone in gone_keys(peers, job.view().members())] == ["b"]
    job.gone("b").member("b", session="s2")
    assert gone_keys(peers, job.view().members()) == []


@pytest.mark.parametrize("verdict", [v for v in Verdict if v is not Verdict.GONE])
def test_other_probe_results_are_no_proof(verdict: Verdict) -> None:
    job, peers = gang(), linked()
    probed(peers, job, verdict)
    assert gone_keys(peers, job.view().members()) == []


@pytest.mark.parametrize(
    ("verdict", "text", "warning"),
    [
        (Verdict.GONE, "is gone: a probe found no workers of it", False),
        (Verdict.WORKERS_ALIVE, "lost its agent; its workers keep running", True),
        (Verdict.UNKNOWN, "does not answer probes: waiting for its lease to expire", True),
    ],
)
def test_log_names_the_probed_member(verdict: Verdict, text: str, warning: bool) -> None:
    job = Job("pod-1", "pod-2").sealed("pod-1", "pod-2")
    answer = Probed(identity("pod-2"), "s1", verdict)
    effects = linked().probed(answer, job.view(), 1.0, ORPHAN_SECONDS)
    notes = [effect for effect in effects if isinstance(effect, Note)]
    assert notes == [Note(f"pod-2 {text}", warning)]


def test_answer_about_a_replaced_session_is_ignored() -> None:
    job, peers = gang(), linked()
    job.gone("b").member("b", session="s2")
    for verdict in Verdict:
        assert probed(peers, job, verdict) == []
    assert gone_keys(peers, job.view().members()) == []
    assert not peers.orphaned
    assert not peers.silent(B)


# -- orphans --------------------------------------------------------------------------


def tended(peers: FailureDetector, job: Job, now: float, every: float = 1.7) -> list[Effect]:
    return detector_upkeep.maintain(peers, job.view(), A, now, every)[0]


def wake(peers: FailureDetector, job: Job, now: float, every: float = 1.7) -> float | None:
    return detector_upkeep.maintain(peers, job.view(), A, now, every)[1]


def test_lease_of_an_orphan_is_renewed_at_once_and_every_second() -> None:
    job, peers = gang(), linked()
    assert without_notes(probed(peers, job, Verdict.WORKERS_ALIVE)) == [KeepAlive(77)]
    assert tended(peers, job, 1.5) == []
    assert wake(peers, job, 1.5) == 2.0
    assert set(tended(peers, job, 2.0)) == {KeepAlive(77), PROBE_B}
    assert wake(peers, job, 2.0) == 3.0


def test_short_lease_is_renewed_more_often() -> None:
    job, peers = gang(), linked()
    probed(peers, job, Verdict.WORKERS_ALIVE)
    assert wake(peers, job, 2.0, every=0.5) == 2.5


def test_orphan_is_kept_for_a_bounded_time() -> None:
    job, peers = gang(), linked()
    probed(peers, job, Verdict.WORKERS_ALIVE, now=1.0)
    probed(peers, job, Verdict.WORKERS_ALIVE, now=20.0)  # it lives on, and gains no time
    assert KeepAlive(77) in tended(peers, job, 1.0 + ORPHAN_SECONDS - 0.1)
    assert tended(peers, job, 1.0 + ORPHAN_SECONDS) == []
    assert not peers.orphaned
    over = gone_keys(peers, job.view().members())
    assert [member.record.name for member in over] == ["b"], "its member is lost then"


def test_launcher_of_an_orphan_is_notified_of_a_newer_round_at_once() -> None:
    job, peers = gang(), linked()
    probed(peers, job, Verdict.WORKERS_ALIVE)
    job.round(2)
    assert replace(PROBE_B, round=2) in tended(peers, job, 1.1)
    assert tended(peers, job, 1.2) == []


def test_orphan_without_a_key_is_still_probed() -> None:
    """The orphan's workers may live on: a key deleted by etcd does not end them."""
    job, peers = gang(), linked()
    probed(peers, job, Verdict.WORKERS_ALIVE)
    job.gone("b")
    assert tended(peers, job, 2.0) == [PROBE_B]


def test_orphan_whose_agent_linked_again_is_no_orphan() -> None:
    job, peers = gang(), linked()
    probed(peers, job, Verdict.WORKERS_ALIVE)
    peers.up(PeerUp(B, "s1"), 2.0)
    assert not peers.orphaned


def test_orphan_whose_member_linked_in_a_new_session_is_no_orphan() -> None:
    job, peers = gang(), linked()
    probed(peers, job, Verdict.WORKERS_ALIVE)
    peers.up(PeerUp(B, "s2"), 2.0)
    assert not peers.orphaned
    assert peers.alive(B, 2.0)


@pytest.mark.parametrize("session", ["s1", "s0"], ids=["of its session", "of an earlier one"])
def test_late_heartbeat_does_not_return_an_orphan_to_its_agent(session: str) -> None:
    job, peers = gang(), linked()
    probed(peers, job, Verdict.WORKERS_ALIVE)
    peers.up(PeerHeartbeat(B, session), 2.0)
    assert peers.orphaned


def test_orphan_is_probed_beside_a_suspected_member() -> None:
    job, peers = gang(), linked()
    probed(peers, job, Verdict.WORKERS_ALIVE)
    peers.quiet(PeerQuiet(C, "s1"), job.view(), 5.0)
    effects = tended(peers, job, 5.0)
    assert [probe.member for probe in effects if isinstance(probe, Probe)] == [B, C]


def test_orphan_adopted_by_a_new_agent_is_no_orphan() -> None:
    job, peers = gang(), linked()
    probed(peers, job, Verdict.WORKERS_ALIVE)
    job.gone("b").member("b", session="s2")
    assert tended(peers, job, 5.0) == []
    assert not peers.orphaned


@pytest.mark.parametrize(("verdict", "proof"), [(Verdict.GONE, True), (Verdict.UNKNOWN, False)])
def test_orphan_that_does_not_answer_is_no_orphan(verdict: Verdict, proof: bool) -> None:
    job, peers = gang(), linked()
    probed(peers, job, Verdict.WORKERS_ALIVE)
    probed(peers, job, verdict)
    assert peers.is_gone(B, "s1") is proof
    assert not peers.orphaned


def test_workers_of_a_linked_member_are_no_orphan() -> None:
    peers = linked(B)
    assert probed(peers, gang(), Verdict.WORKERS_ALIVE) == []


@pytest.mark.parametrize("verdict", [Verdict.AGENT_ALIVE, Verdict.BOTH_ALIVE])
def test_agent_that_answered_without_a_link_is_probed_again(verdict: Verdict) -> None:
    """The agent may have been about to die."""
    job, peers = gang(), linked()
    probed(peers, job, verdict, now=1.0)
    assert tended(peers, job, 1.0) == []
    again = wake(peers, job, 1.0)
    assert again is not None
    assert 1.0 < again < 2.0
    assert tended(peers, job, again) == [PROBE_B]
    probed(peers, job, verdict, now=2.0)
    peers.up(PeerUp(B, "s1"), 2.0)
    assert tended(peers, job, 9.0) == []


def test_agent_that_answers_without_a_link_is_probed_with_back_off() -> None:
    """At first it may be about to die; a link shows that it is not, and the next trouble is new."""
    job, peers = gang(), linked()
    now, pauses = 1.0, []
    for turn in range(6):
        probed(peers, job, Verdict.BOTH_ALIVE, now)
        again = wake(peers, job, now)
        assert again is not None
        pauses.append(round(again - now, 6))
        assert tended(peers, job, again) == [PROBE_B]
        now = again
        if turn == 3:
            peers.up(PeerUp(B, "s1"), now)
            peers.down(PeerDown(B, "s1"), job.view(), now)
    assert pauses == [0.02, 0.06, 0.3, 0.3, 0.02, 0.06]


@pytest.mark.parametrize("session", [None, "s2"], ids=["its key is gone", "in a new session"])
def test_agent_that_answered_without_a_link_and_left_is_not_probed_again(
    session: str | None,
) -> None:
    job, peers = gang(), linked()
    probed(peers, job, Verdict.AGENT_ALIVE, now=1.0)
    job.gone("b")
    if session is not None:
        job.member("b", session=session)
    assert tended(peers, job, 9.0) == []
    assert peers.session(B, "s1").link is LinkState.UNLINKED


def test_after_takeover_running_members_without_a_link_are_probed_once() -> None:
    """An orphan's link never closes, because it had none to this coordinator."""
    job, peers = gang(), FailureDetector()
    job.change("a", state=MemberState.RUNNING)
    peers.begin((), 10.0)
    peers.up(PeerUp(C, "s1"), 10.5)
    assert tended(peers, job, 10.5) == []
    due = wake(peers, job, 10.5)
    assert due is not None
    assert tended(peers, job, due) == [PROBE_B]
    assert tended(peers, job, due + 60) == []


@pytest.mark.parametrize(
    "state", [state for state in MemberState if state is not MemberState.RUNNING]
)
def test_takeover_before_a_final_round_probes_no_members_without_workers(
    state: MemberState,
) -> None:
    """They link when the round is final."""
    job, peers = gang().round(2, previous=1), FailureDetector()
    job.change("a", state=MemberState.WAITING).change("b", state=state)
    job.change("c", state=MemberState.WAITING)
    peers.begin((), 10.0)
    assert tended(peers, job, 10.0) == []
    assert tended(peers, job, 60.0) == []


def test_takeover_before_a_final_round_probes_a_member_with_workers_after_a_second() -> None:
    job, peers = gang().round(2, previous=1), FailureDetector()
    job.change("a", state=MemberState.WAITING).change("c", state=MemberState.WAITING)
    peers.begin((), 10.0)
    assert tended(peers, job, 10.0) == []
    assert wake(peers, job, 10.0) == 11.0
    assert tended(peers, job, 11.0) == [replace(PROBE_B, round=2)]


@pytest.mark.parametrize("state", [MemberState.RUNNING, MemberState.WAITING, MemberState.STOPPING])
def test_member_killed_before_it_linked_is_probed_a_second_after_its_final_round(
    state: MemberState,
) -> None:
    job, peers = gang().change("b", state=state), FailureDetector()
    peers.up(PeerUp(C, "s1"), 10.0)
    assert tended(peers, job, 10.0) == []
    assert wake(peers, job, 10.0) == 11.0
    peers.up(PeerHeartbeat(C, "s1"), 10.9)
    assert tended(peers, job, 11.0) == [PROBE_B]
    assert [key.record.id for key in probed_gone(peers, job, 11.1)] == [B]


def test_session_that_was_set_aside_is_probed_once_at_the_takeover() -> None:
    """Nobody renews its lease, which may run out before the members that link are probed."""
    aside = replace(PROBE_B, session="s1~")
    job, peers = gang().change("b", session="s1~"), FailureDetector()
    peers.up(PeerUp(C, "s1"), 9.0)
    peers.begin([], 10.0)
    assert tended(peers, job, 10.0) == [aside]
    assert tended(peers, job, 10.1) == []
    verdict = Probed(B, "s1~", Verdict.WORKERS_ALIVE)
    assert KeepAlive(77) in peers.probed(verdict, job.view(), 10.2, ORPHAN_SECONDS)


def test_each_final_round_has_one_roll_call() -> None:
    job, peers = gang(), FailureDetector()
    for member in (B, C):
        peers.up(PeerUp(member, "s1"), 10.0)
    assert tended(peers, job, 10.0) == []
    assert tended(peers, job, 11.0) == []
    assert peers.unlinked_probe_at is None
    assert tended(peers, job, 12.0) == []
    assert peers.unlinked_probe_at is None


def test_roll_call_leaves_out_orphans() -> None:
    """An orphan has its own probes, and no agent that could answer."""
    job, peers = gang(), FailureDetector()
    peers.up(PeerUp(C, "s1"), 10.0)
    assert tended(peers, job, 10.0) == []
    probed(peers, job, Verdict.WORKERS_ALIVE, now=10.5)
    assert tended(peers, job, 11.0) == []
    assert not inquiries(peers)


def test_agent_that_answers_is_probed_beside_a_member_proven_gone() -> None:
    job, peers = gang(), linked()
    peers.probed(Probed(C, "s1", Verdict.GONE), job.view(), 1.0, ORPHAN_SECONDS)
    probed(peers, job, Verdict.AGENT_ALIVE, now=1.0)
    assert tended(peers, job, 2.0) == [PROBE_B]


# -- inquiries ------------------------------------------------------------------------


def absent() -> Job:
    """Return a job with round 2 joinable and b, which ran round 1, without a key."""
    return gang().gone("b").round(2, previous=1)


def asked(peers: FailureDetector, job: Job, now: float) -> Verdict | None:
    assignment = job.roster(1).assignment(B)
    assert assignment is not None
    return peers.inquire(assignment, now)


def test_absent_member_is_probed_at_once_and_every_half_second() -> None:
    """The probe goes to the address in the member's seat, with the newest round's number."""
    job, peers = absent(), linked()
    assert asked(peers, job, 5.0) is None
    assert tended(peers, job, 5.0) == [replace(PROBE_B, round=2)]
    assert tended(peers, job, 5.4) == []
    assert wake(peers, job, 5.4) == 5.0 + PROBE_INTERVAL_SECONDS
    asked(peers, job, 5.4)  # repeated inquiries hurry nothing
    assert tended(peers, job, 5.45) == []
    job.round(3, previous=1)
    assert tended(peers, job, 5.5) == [replace(PROBE_B, round=3)]
    assert tended(peers, job, 5.6) == []


def test_probe_is_repeated_after_half_a_second_without_events() -> None:
    job, peers = absent(), linked()
    asked(peers, job, 5.0)
    effects, again = detector_upkeep.maintain(peers, job.view(), A, 5.0, 1.7)
    assert effects == [replace(PROBE_B, round=2)]
    assert again == 5.0 + PROBE_INTERVAL_SECONDS


def test_probe_is_due_until_it_was_sent() -> None:
    job, peers = absent(), linked()
    assert peers.first_probe_at(B) is None, "nobody wants to know"
    asked(peers, job, 5.0)
    assert peers.first_probe_at(B) == 5.0
    tended(peers, job, 5.0)
    assert peers.first_probe_at(B) is None
    asked(peers, job, 5.1)
    tended(peers, job, 5.0 + PROBE_INTERVAL_SECONDS)
    assert peers.first_probe_at(B) is None


@pytest.mark.parametrize("verdict", list(Verdict))
def test_answer_is_remembered(verdict: Verdict) -> None:
    job, peers = absent(), linked()
    asked(peers, job, 5.0)
    probed(peers, job, verdict)
    assert asked(peers, job, 5.1) is verdict
    probed(peers, job, Verdict.GONE)
    assert asked(peers, job, 5.2) is Verdict.GONE


@pytest.mark.parametrize("state", [RoundState.FROZEN, RoundState.FINAL, RoundState.CLOSED])
def test_members_are_probed_only_while_a_round_is_joinable(state: RoundState) -> None:
    job, peers = absent(), linked()
    asked(peers, job, 5.0)
    job.round(2, state, previous=1)
    assert tended(peers, job, 5.0) == []
    assert not inquiries(peers)


def test_member_with_a_key_again_is_not_probed() -> None:
    job, peers = absent(), linked()
    asked(peers, job, 5.0)
    job.member("b", session="s2")
    assert tended(peers, job, 5.0) == []
    assert not inquiries(peers)


def test_answers_are_not_inherited() -> None:
    job, peers = absent(), linked()
    asked(peers, job, 5.0)
    probed(peers, job, Verdict.UNKNOWN)
    Coordinator(peers).resign()
    peers.begin((), 6.0)
    assert asked(peers, job, 6.0) is None


def test_unanswered_probe_sent_before_an_answer_does_not_replace_it() -> None:
    """Probes overlap: an unanswered one may have been sent before an answered one."""
    job, peers = absent(), linked()
    asked(peers, job, 5.0)
    probed(peers, job, Verdict.WORKERS_ALIVE, 6.0)
    probed(peers, job, Verdict.UNKNOWN, 6.0 + LONGEST_PROBE_SECONDS - 0.1)
    assert asked(peers, job, 11.0) is Verdict.WORKERS_ALIVE
    probed(peers, job, Verdict.UNKNOWN, 6.0 + LONGEST_PROBE_SECONDS)
    assert asked(peers, job, 11.0) is Verdict.UNKNOWN


def test_member_that_answered_in_an_older_round_is_probed_again() -> None:
    """The launcher may have ended its workers since: the probe tells it of the newer round."""
    job, peers = absent(), linked()
    asked(peers, job, 5.0)
    tended(peers, job, 5.0)
    probed(peers, job, Verdict.WORKERS_ALIVE, 5.1)
    job.round(3, previous=1)
    assert tended(peers, job, 5.2) == [replace(PROBE_B, round=3)]
    assert asked(peers, job, 5.2) is None


def test_workers_that_answered_are_probed_again_while_a_round_waits() -> None:
    job, peers = absent(), linked()
    asked(peers, job, 5.0)
    tended(peers, job, 5.0)
    probed(peers, job, Verdict.WORKERS_ALIVE, 5.1)
    assert tended(peers, job, 5.4) == []
    assert tended(peers, job, 5.0 + PROBE_INTERVAL_SECONDS) == [replace(PROBE_B, round=2)]


@pytest.mark.parametrize("first", ["it came back", "it answered"])
def test_answer_of_one_member_does_not_end_probes_of_another(first: str) -> None:
    """While its round stands one answer is enough."""
    job, peers = gang().gone("b", "c"), linked()
    for id in (B, C):
        assignment = job.roster(1).assignment(id)
        assert assignment is not None
        peers.inquire_during_round(assignment, 5.0, 4.0)
    if first == "it came back":
        job.member("b", session="s2")
    else:
        probed(peers, job, Verdict.BOTH_ALIVE, 5.1)
    [effect] = tended(peers, job, 5.0 + PROBE_INTERVAL_SECONDS)
    assert isinstance(effect, Probe)
    assert effect.member == C


def test_without_a_round_no_member_is_probed() -> None:
    """Etcd lost it: who ran in it is asked for once more if need be."""
    job, peers = absent(), linked()
    asked(peers, job, 5.0)
    job.delete(KEYS.round)
    assert tended(peers, job, 5.0) == []
    assert not inquiries(peers)


def test_deadline_of_an_unprobed_member_is_unknown() -> None:
    assert linked().live_until(B) is None


# -- absent while its round stands ----------------------------------------------------


def absent_from_its_round() -> Job:
    return gang().gone("b")


def asked_meanwhile(
    peers: FailureDetector, job: Job, now: float, seconds: float = 4.0
) -> Verdict | None:
    assignment = job.roster(1).assignment(B)
    assert assignment is not None
    return peers.inquire_during_round(assignment, now, seconds)


@pytest.mark.parametrize(
    ("heard_ago", "pause"),
    [
        (None, PROBE_INTERVAL_SECONDS),
        (0.9, PROBE_INTERVAL_SECONDS),
        (MISSED_SECONDS, 0.0),
        (9.0, 0.0),
    ],
)
def test_recently_heard_member_is_probed_at_once_and_others_after_a_delay(
    heard_ago: float | None, pause: float
) -> None:
    job, peers = absent_from_its_round(), linked()
    if heard_ago is not None:
        peers.up(PeerUp(B, "s1"), 20.0 - heard_ago)
    assert asked_meanwhile(peers, job, 20.0) is None
    assert peers.first_probe_at(B) == 20.0 + pause


def test_during_its_round_absent_member_is_probed_until_its_time_ends() -> None:
    job, peers = absent_from_its_round(), linked()
    asked_meanwhile(peers, job, 20.0, seconds=4.0)
    assert tended(peers, job, 20.5) == [PROBE_B]
    assert tended(peers, job, 23.9) == [PROBE_B]
    assert tended(peers, job, 24.0) == []
    assert not inquiries(peers)


def test_during_its_round_one_answer_of_an_absent_member_suffices() -> None:
    job, peers = absent_from_its_round(), linked()
    asked_meanwhile(peers, job, 20.0)
    assert tended(peers, job, 20.5) == [PROBE_B]
    probed(peers, job, Verdict.BOTH_ALIVE, 20.6)
    assert tended(peers, job, 21.5) == []
    assert asked_meanwhile(peers, job, 21.5) is Verdict.BOTH_ALIVE


# -- suspicions -----------------------------------------------------------------------


def suspected(job: Job, now: float = 5.0) -> FailureDetector:
    """Return links on which b has been silent since 3.5."""
    peers = linked(B, at=now - 1.5)
    peers.quiet(PeerQuiet(B, "s1"), job.view(), now)
    return peers


def test_quiet_member_is_probed_until_an_answer_is_known() -> None:
    job = gang()
    peers = suspected(job)
    assert tended(peers, job, 5.0) == [PROBE_B]
    assert tended(peers, job, 5.4) == []
    assert wake(peers, job, 5.4) == 5.0 + PROBE_INTERVAL_SECONDS
    probed(peers, job, Verdict.UNKNOWN, 5.5)
    assert tended(peers, job, 5.5) == [PROBE_B]


@pytest.mark.parametrize("verdict", [verdict for verdict in Verdict if verdict != "unknown"])
def test_answer_ends_the_suspicion(verdict: Verdict) -> None:
    job = gang()
    peers = suspected(job)
    probed(peers, job, verdict, 5.1)
    tended(peers, job, 5.1)
    assert not inquiries(peers)


def test_message_of_the_agent_ends_the_suspicion() -> None:
    peers = suspected(gang())
    peers.up(PeerHeartbeat(B, "s1"), 5.1)
    assert not inquiries(peers)


def test_unanswered_probe_is_ignored_while_the_link_is_open() -> None:
    job = gang()
    peers = suspected(job)
    assert probed(peers, job, Verdict.UNKNOWN, 5.5) == []
    assert not peers.silent(B)


def test_member_without_answer_is_logged_once() -> None:
    job = gang()
    peers = suspected(job)
    peers.down(PeerDown(B, "s1"), job.view(), 6.5)
    assert len(probed(peers, job, Verdict.UNKNOWN, 7.0)) == 1
    assert probed(peers, job, Verdict.UNKNOWN, 7.5) == []


def test_other_session_than_the_quiet_one_is_not_suspected() -> None:
    peers = linked(B)
    peers.quiet(PeerQuiet(B, "s0"), gang().view(), 5.0)
    assert not inquiries(peers)


@pytest.mark.parametrize(
    ("session", "effects"), [("s1", []), ("s2", [replace(PROBE_B, session="s2")])]
)
def test_second_suspicion_probes_at_once_only_for_another_session(
    session: str, effects: list[Effect]
) -> None:
    job = gang()
    peers = suspected(job)
    assert tended(peers, job, 5.0) == [PROBE_B]
    if session != "s1":
        job.gone("b").member("b", session=session, state=MemberState.RUNNING, round=1)
    peers.quiet(PeerQuiet(B, session), job.view(), 5.2)
    assert tended(peers, job, 5.2) == effects


def test_suspicion_of_a_new_session_replaces_the_inquiry_about_the_absent_one() -> None:
    """A message of the new agent ends it."""
    job, peers = absent(), linked()
    asked(peers, job, 5.0)
    job.member("b", session="s2", state=MemberState.RUNNING, round=1)
    peers.quiet(PeerQuiet(B, "s2"), job.view(), 6.0)
    assert B in inquiries(peers)
    peers.up(PeerHeartbeat(B, "s2"), 6.1)
    assert not inquiries(peers)


def test_probes_of_a_member_that_keeps_its_key_are_bounded() -> None:
    """The member reaches etcd, but not the coordinator."""
    job = gang()
    peers = suspected(job)
    tended(peers, job, 5.0 + peers.inquiry_seconds - 0.1)
    assert B in inquiries(peers)
    tended(peers, job, 5.0 + peers.inquiry_seconds)
    assert not inquiries(peers)


def test_answer_known_when_the_key_goes_needs_no_further_probe() -> None:
    job = gang()
    peers = suspected(job)
    tended(peers, job, 5.0)
    probed(peers, job, Verdict.UNKNOWN, 7.0)
    job.gone("b")
    assert tended(peers, job, 7.1) == [PROBE_B]
    job.round(2, previous=1)
    assert asked(peers, job, 7.2) is Verdict.UNKNOWN
    assert tended(peers, job, 7.2) == [replace(PROBE_B, round=2)], "and yet the newest counts"
    peers.up(PeerHeartbeat(B, "s1"), 7.3)
    assert asked(peers, job, 7.3) is Verdict.UNKNOWN, "a word of it renews its link, no more"
    assert peers.last_heartbeat_at(B) == 7.3


# -- isolation ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("silent", "others", "cut_off"),
    [
        ((), (B, C), False),
        ((B,), (B,), False),
        ((B,), (B, C), False),
        ((B, C), (B, C), True),
        ((B, C), (B, C, D), True),
        ((B,), (B, C, D), False),
    ],
)
def test_more_than_half_of_the_peers_silent_means_cut_off(
    silent: tuple[str, ...], others: tuple[str, ...], cut_off: bool
) -> None:
    job, peers = Job("a", "b", "c", "d"), linked()
    for member in silent:
        peers.probed(Probed(member, "s1", Verdict.UNKNOWN), job.view(), 1.0, ORPHAN_SECONDS)
    assert peers.cut_off(others) is cut_off


def test_member_that_links_again_is_not_silent() -> None:
    job, peers = gang(), linked()
    for member in (B, C):
        peers.probed(Probed(member, "s1", Verdict.UNKNOWN), job.view(), 1.0, ORPHAN_SECONDS)
    peers.up(PeerUp(C, "s1"), 2.0)
    assert not peers.cut_off((B, C))


# -- heartbeats without a decision ----------------------------------------------------


@pytest.mark.parametrize(
    ("trouble", "routine"),
    [
        (None, True),
        ("no link", False),
        ("suspected", False),
        ("silent", False),
        ("link lost", False),
        ("answers probes", False),
        ("orphans elsewhere", False),
        ("suspicion elsewhere", True),
    ],
)
def test_heartbeat_is_routine_if_nothing_stands_against_its_member(
    trouble: str | None, routine: bool
) -> None:
    job, peers = gang(), linked(B) if trouble != "no link" else linked()
    match trouble:
        case "suspected":
            peers.quiet(PeerQuiet(B, "s1"), job.view(), 5.0)
        case "silent":
            peers.take(B, MemberEvent.NO_ANSWER)
        case "link lost":
            peers.take(B, MemberEvent.LINK_LOST)
        case "answers probes":
            peers = linked()
            probed(peers, job, Verdict.AGENT_ALIVE)
            assert not peers.is_routine(PeerUp(B, "s1"))
        case "orphans elsewhere":
            peers.probed(Probed(C, "s1", Verdict.WORKERS_ALIVE), job.view(), 1.0, ORPHAN_SECONDS)
        case "suspicion elsewhere":
            peers.quiet(PeerQuiet(C, "s1"), job.view(), 5.0)
    assert peers.is_routine(PeerHeartbeat(B, "s1")) is routine


def test_first_link_of_an_unsuspected_member_is_routine() -> None:
    assert linked().is_routine(PeerUp(B, "s1"))


# -- liveness -------------------------------------------------------------------------


def test_link_is_alive_while_messages_arrive() -> None:
    peers = linked(B, C, at=10.0)
    peers.up(PeerHeartbeat(C, "s1"), 12.0)
    assert peers.alive(B, 12.0)
    assert peers.alive(C, 12.0 + LINK_SILENCE_SECONDS)  # the other side may still trust the link
    assert peers.alive(C, 11.9 + COUNTS_AS_ALIVE_SECONDS)
    assert not peers.alive(C, 12.0 + COUNTS_AS_ALIVE_SECONDS)
    assert not peers.alive(D, 12.0)


def test_last_heartbeat_counts_from_either_side() -> None:
    """A former coordinator was heard on our own link to it."""
    peers = linked()
    assert peers.last_heartbeat_at(B) is None
    peers.note_leader_heartbeat(B, 5.0)
    assert (peers.leader_heartbeat_at(B), peers.leader_heartbeat_at(C)) == (5.0, None)
    assert peers.last_heartbeat_at(B) == 5.0
    peers.up(PeerUp(B, "s1"), 7.0)
    assert (peers.leader_heartbeat_at(B), peers.last_heartbeat_at(B)) == (5.0, 7.0)
    peers.note_leader_heartbeat(B, 9.0)
    assert peers.last_heartbeat_at(B) == 9.0


@pytest.mark.parametrize(
    ("others", "evidence"),
    [((B,), 9.5), ((C,), 11.5), ((B, C), 9.5), ((B, D), None), ((D,), None)],
)
def test_evidence_is_as_old_as_the_oldest_heartbeat(
    others: tuple[str, ...], evidence: float | None
) -> None:
    """Agents that do not report their receipts add up to half a second of age."""
    peers = linked(B, C, at=10.0)
    peers.up(PeerHeartbeat(C, "s1"), 12.0)
    peers.down(PeerDown(B, "s1"), gang().view(), 13.0)  # earlier receipts still count
    assert peers.evidence(others) == evidence


def test_nobody_gives_no_evidence() -> None:
    assert linked(B).evidence(()) is None


def test_evidence_is_no_newer_than_the_last_receipt_of_the_peer() -> None:
    peers = FailureDetector()
    peers.up(PeerUp(B, "s1", sent=9.0), 10.0)
    assert peers.evidence([B]) == 9.0
    peers.up(PeerHeartbeat(B, "s1", sent=9.5), 12.0)
    assert peers.evidence([B]) == 9.5
    peers.up(PeerHeartbeat(B, "s0", sent=8.0), 12.0)
    assert peers.evidence([B]) == 9.5, "a late word of an earlier link takes nothing back"
    assert peers.last_heartbeat_at(B) == 12.0, "it may trust us since then"


def test_new_coordinator_keeps_links_and_proofs_and_drops_suspicions() -> None:
    job, peers = gang(), linked(C)
    probed(peers, job, Verdict.UNKNOWN)
    probed(peers, job, Verdict.GONE)
    peers.down(PeerDown(C, "s1"), job.view(), 1.0)
    peers.up(PeerUp(D, "s1"), 1.0)
    peers.begin([(A, "s1")], 1.0)
    assert peers.dead_sessions() == {(A, "s1")}
    assert not peers.silent(B)
    assert peers.symptom([B, C]) is None
    assert [id for id, peer in peers.states.items() if peer.linked] == [D]
    assert peers.evidence([D]) == 0.5


def test_proof_of_end_outlives_a_key_not_seen_yet() -> None:
    job, peers = gang(), linked()
    job.gone("b")
    probed(peers, job, Verdict.GONE)
    assert peers.is_gone(B, "s1")


def test_orphan_workers_may_live_as_long_as_the_lease_of_their_member() -> None:
    job, peers = gang(), linked()
    probed(peers, job, Verdict.WORKERS_ALIVE, now=1.0)
    assert detector_upkeep.extend_orphans(peers, 78, 9.0, job.view(), 1.0) == [], (
        "somebody else's lease"
    )
    [permission] = detector_upkeep.extend_orphans(peers, 77, 9.0, job.view(), 1.0)
    assert permission == replace(PROBE_B, live_until=9.0)
    assert granted(peers) == {B: 9.0}
    assert tended(peers, job, 2.0) == [KeepAlive(77)], "the answer brings the next permission"
    assert replace(PROBE_B, live_until=9.0) in tended(peers, job, 3.0), "there was no answer"
    [longest] = detector_upkeep.extend_orphans(peers, 77, 1000.0, job.view(), 3.5)
    assert isinstance(longest, Probe)
    assert longest.live_until == 1.0 + ORPHAN_SECONDS, "no longer than an agent may be away"
    job.gone("b")
    assert detector_upkeep.extend_orphans(peers, 77, 1000.0, job.view(), 4.0) == [], "no key"
    assert not any(isinstance(e, Probe) and e.live_until for e in tended(peers, job, 6.0))


def test_each_of_several_orphans_lives_by_its_own_lease() -> None:
    job, peers = gang().change("c", lease=78), linked()
    probed(peers, job, Verdict.WORKERS_ALIVE)
    peers.probed(Probed(C, "s1", Verdict.WORKERS_ALIVE), job.view(), 1.0, ORPHAN_SECONDS)
    [permission] = detector_upkeep.extend_orphans(peers, 78, 9.0, job.view(), 1.0)
    assert isinstance(permission, Probe)
    assert (permission.member, permission.live_until) == (C, 9.0)
    assert granted(peers) == {C: 9.0}


def test_orphan_lives_by_its_lease_beside_a_member_proven_gone() -> None:
    job, peers = gang(), linked()
    peers.probed(Probed(C, "s1", Verdict.GONE), job.view(), 1.0, ORPHAN_SECONDS)
    probed(peers, job, Verdict.WORKERS_ALIVE)
    assert detector_upkeep.extend_orphans(peers, 77, 9.0, job.view(), 1.0)
    assert granted(peers) == {B: 9.0}
    assert KeepAlive(77) in tended(peers, job, 2.0)


def test_expired_lease_grants_no_time() -> None:
    job, peers = gang(), linked()
    probed(peers, job, Verdict.WORKERS_ALIVE)
    assert detector_upkeep.extend_orphans(peers, 77, 5.0, job.view(), 5.0) == [PROBE_B]
    assert not granted(peers)


def test_shorter_grant_does_not_shorten_an_earlier_one() -> None:
    """Its agent came back and died again: its launcher may still hold the first deadline."""
    job, peers = gang(), linked()
    probed(peers, job, Verdict.WORKERS_ALIVE)
    detector_upkeep.extend_orphans(peers, 77, 20.0, job.view(), 1.0)
    peers.up(PeerUp(B, "s1"), 2.0)
    peers.down(PeerDown(B, "s1"), job.view(), 6.5)
    probed(peers, job, Verdict.WORKERS_ALIVE, now=7.0)
    [permission] = detector_upkeep.extend_orphans(peers, 77, 9.0, job.view(), 7.0)
    assert isinstance(permission, Probe)
    assert permission.live_until == 9.0
    assert granted(peers) == {B: 20.0}
