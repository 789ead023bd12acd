"""Evidence and its ends: for our workers, and for those who rely on what our links tell them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elasticjob_rendezvous.core.alarm import Alarm
from elasticjob_rendezvous.core.config import Config, Identity
from elasticjob_rendezvous.core.effects import Serve
from elasticjob_rendezvous.core.events import Clock, LinkHeard, PeerHeard
from elasticjob_rendezvous.core.local import Local, Workers
from elasticjob_rendezvous.core.membership import Membership
from elasticjob_rendezvous.core.peers import LINK_SILENCE_SECONDS, RELAY_SECONDS, TRUST_SECONDS
from elasticjob_rendezvous.core.records import RoundState
from elasticjob_rendezvous.core.vouching import live_until, may_go_on, vouch, vouched_until
from tests.unit.rendezvous.builders import KEYS, Job, identity

A, B, C = (identity(name) for name in "abc")
NOW = 100.0
LEASE_ENDS = 102.0
ROUND = 4
NEVER = -math.inf


def member(round: int = ROUND, **local: Any) -> Membership:
    """Member a of a gang of three in round 4, whose lease ends soon; without any evidence."""
    our = Membership(Config(KEYS.prefix, Identity(A, "a", "host-a", 7000, 7001), "n-a"))
    our.clock = Clock(NOW, 0)
    our.view = Job("a", "b", "c").sealed("a", "b", "c", number=ROUND).view()
    our.rounds.remember(our.view)
    our.crew.tell(Local(ready=True, workers=Workers.RUNNING, round=round, **local))
    our.safety.backed_until = LEASE_ENDS
    our.sessions = 1
    return our


def follows(our: Membership, number: int, sent: float = NOW) -> Membership:
    """Its coordinator spoke on its link."""
    our.leadership.link = (B, "s1")
    our.leadership.link_heard(LinkHeard(B, "s1", number, sent), NOW)
    return our


def leads(our: Membership, *heard: str, sent: float = NOW) -> Membership:
    """Members spoke on their links to it."""
    for id in heard:
        our.coordinator.peers.up(PeerHeard(id, "s1", sent), NOW)
    return our


# -- our workers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("our", "until"),
    [
        (member(), LEASE_ENDS),
        (follows(member(), ROUND), NOW + TRUST_SECONDS),
        (follows(member(), ROUND, sent=NOW - 3), LEASE_ENDS),
        (follows(member(), ROUND + 1), LEASE_ENDS),
        (follows(member(ROUND - 1), ROUND), LEASE_ENDS),
        (leads(member(), B, C), NOW + TRUST_SECONDS),
        (leads(member(), B), LEASE_ENDS),
    ],
    ids=[
        "by their lease",
        "by a link that lasts longer",
        "by a link that ends sooner",
        "the link tells a newer round",
        "workers of an older round",
        "by the links of the whole gang",
        "a part of the gang proves nothing",
    ],
)
def test_worker_deadline_is_the_latest_end_of_evidence(our: Membership, until: float) -> None:
    assert live_until(our) == pytest.approx(until)


@pytest.mark.parametrize(
    ("sessions", "found", "until"),
    [(0, NOW + 60, NEVER), (0, None, LEASE_ENDS), (1, NOW + 60, LEASE_ENDS)],
    ids=["not registered yet", "their launcher holds none", "registered"],
)
def test_found_deadline_is_kept_before_registration(
    sessions: int, found: float | None, until: float
) -> None:
    """No other member knows of evidence from before the first key."""
    our = member(live_until=found)
    our.sessions = sessions
    assert live_until(our) == until


def test_found_workers_live_by_links_before_registration() -> None:
    our = follows(member(live_until=NOW + 60), ROUND)
    our.sessions = 0
    assert live_until(our) == pytest.approx(NOW + TRUST_SECONDS)
    old = follows(member(ROUND - 1, live_until=NOW + 60), ROUND)
    old.sessions = 0
    assert live_until(old) == NEVER


@pytest.mark.parametrize(
    ("state", "ends"),
    [(RoundState.CLOSED, False), (RoundState.FINAL, True), (RoundState.JOINABLE, True)],
)
def test_closed_job_has_no_newer_round_to_stop_its_workers(state: RoundState, ends: bool) -> None:
    our = member()
    our.view = Job("a", "b", "c").round(ROUND, state).view()
    assert math.isfinite(live_until(our)) is ends


def test_worker_deadline_uses_links_of_members_that_are_not_done() -> None:
    our = leads(member(), B)
    our.view = Job("a", "b", "c").sealed("a", "b", "c", number=ROUND).done("c", round=ROUND).view()
    assert live_until(our) == pytest.approx(NOW + TRUST_SECONDS)


@pytest.mark.parametrize(
    ("our", "until"),
    [
        (member(), LEASE_ENDS),
        (follows(member(), ROUND), NOW + TRUST_SECONDS),
        (follows(member(ROUND - 1), ROUND), LEASE_ENDS),
        (leads(member(), B, C), NOW + TRUST_SECONDS),
    ],
    ids=["by their lease", "by a link", "an older round's", "by the whole gang"],
)
def test_workers_continue_until_their_evidence_ends(our: Membership, until: float) -> None:
    our.clock, our.alarm = Clock(until - 0.1, 0), Alarm()
    assert may_go_on(our)
    assert our.alarm.at == pytest.approx(until), "they are looked at again then"
    our.clock = Clock(until + 0.001, 0)
    assert not may_go_on(our)


@pytest.mark.parametrize(
    ("workers", "found", "sessions", "goes_on"),
    [
        (Workers.NONE, None, 1, True),
        (Workers.RUNNING, None, 1, False),
        (Workers.RUNNING, NOW + 60, 0, True),
        (Workers.RUNNING, NOW + 60, 1, False),
    ],
    ids=["nothing runs", "workers run", "their launcher holds a deadline", "we are registered"],
)
def test_without_evidence_only_harmless_workers_continue(
    workers: Workers, found: float | None, sessions: int, goes_on: bool
) -> None:
    our = member(live_until=found)
    our.crew.tell(Local(ready=True, workers=workers, round=ROUND, live_until=found))
    our.sessions, our.safety.backed_until = sessions, 0.0
    assert may_go_on(our) is goes_on
    assert our.alarm.at is None


# -- what others may rely on ----------------------------------------------------------


@pytest.mark.parametrize(
    ("our", "until"),
    [
        (member(), LEASE_ENDS),
        (follows(member(), ROUND), NOW + TRUST_SECONDS),
        (follows(member(), ROUND + 1), LEASE_ENDS),
        (follows(member(ROUND - 1), ROUND), NOW + TRUST_SECONDS),
        (leads(member(), B, C), NOW + TRUST_SECONDS + RELAY_SECONDS),
        (leads(member(), B, C, sent=NOW - 4), LEASE_ENDS),
        (leads(member(), B), LEASE_ENDS),
        (leads(member(ROUND - 1), B, C), NOW + TRUST_SECONDS + RELAY_SECONDS),
    ],
    ids=[
        "on its lease",
        "on its own coordinator's link",
        "that link tells of a newer round",
        "that link, whatever runs here",
        "on the whole gang, and a little longer",
        "the gang was heard long ago",
        "a part of the gang proves nothing",
        "on the whole gang, whatever runs here",
    ],
)
def test_relayed_evidence_is_the_longest_lasting_one(our: Membership, until: float) -> None:
    assert vouched_until(our) == pytest.approx(until)


def test_done_member_need_not_be_heard() -> None:
    our = leads(member(), B)
    our.view = Job("a", "b", "c").sealed("a", "b", "c", number=ROUND).done("c", round=ROUND).view()
    assert vouched_until(our) == pytest.approx(NOW + TRUST_SECONDS + RELAY_SECONDS)
    our.view = Job("a", "b", "c").sealed("a", "b", "c", number=ROUND).done("c", round=3).view()
    assert vouched_until(our) == LEASE_ENDS, "it was done in an older round"


def test_last_working_member_relays_evidence_of_a_refusing_etcd() -> None:
    our = member()
    our.view = (
        Job("a", "b", "c").sealed("a", "b", "c", number=ROUND).done("b", "c", round=ROUND).view()
    )
    assert vouched_until(our) == LEASE_ENDS
    our.safety.store_refused_at = NOW
    assert vouched_until(our) == pytest.approx(NOW + LINK_SILENCE_SECONDS + RELAY_SECONDS)


@pytest.mark.parametrize("number", [None, ROUND + 1], ids=["no round", "a newer round"])
def test_gang_is_no_evidence_for_a_round_of_others(number: int | None) -> None:
    job = Job("a", "b", "c")
    our = leads(member(), B, C)
    our.view = (job if number is None else job.round(number)).view()
    assert vouched_until(our) == LEASE_ENDS


def test_first_gang_is_no_evidence_while_its_round_is_unknown() -> None:
    """Etcd lost its data: what number comes next is yet to be read."""
    our = leads(member(), B, C)
    our.view = Job("a", "b", "c").sealed("a", "b", "c", number=1).view()
    our.rounds.remember(our.view)
    assert vouched_until(our) == pytest.approx(NOW + TRUST_SECONDS + RELAY_SECONDS)
    our.view = Job("a", "b", "c").view()
    assert vouched_until(our) == LEASE_ENDS


# -- the number that others are told --------------------------------------------------


def told(our: Membership, now: float = NOW) -> list[int]:
    """The numbers that those who link to it are told now."""
    our.clock, our.alarm, our.effects = Clock(now, 0), Alarm(), []
    vouch(our)
    assert all(isinstance(effect, Serve) for effect in our.effects)
    return [effect.round for effect in our.effects if isinstance(effect, Serve)]


def test_coordinator_sends_its_round_once_and_a_higher_number_after_its_evidence() -> None:
    our = member()
    our.coordinator.active = True
    assert told(our) == [ROUND]
    assert our.alarm.at == LEASE_ENDS
    assert told(our) == []
    assert told(our, LEASE_ENDS) == [ROUND + 1]
    assert told(our, LEASE_ENDS + 1) == []
    our.safety.backed_until = LEASE_ENDS + 9
    assert told(our, LEASE_ENDS + 2) == [ROUND]


@pytest.mark.parametrize(
    ("our", "until"),
    [(follows(member(), ROUND), NOW + TRUST_SECONDS), (leads(member(), B, C), NOW + TRUST_SECONDS)],
    ids=["by its own coordinator's link", "by the links of its gang"],
)
def test_coordinator_with_expired_lease_sends_its_round_while_links_are_evidence(
    our: Membership, until: float
) -> None:
    our.coordinator.active = True
    assert told(our, until - 0.1) == [ROUND]
    assert our.alarm.at == pytest.approx(until)
    assert told(our, until + 0.001) == [ROUND + 1]


def test_former_coordinator_without_evidence_sends_a_higher_number() -> None:
    our = member()
    our.coordinator.active = True
    assert told(our) == [ROUND]
    our.coordinator.resign()
    assert told(our, LEASE_ENDS) == [ROUND + 1]


@pytest.mark.parametrize("knows", [True, False], ids=["it never coordinated", "nor a round"])
def test_member_that_never_coordinated_sends_no_number(knows: bool) -> None:
    our = member()
    if not knows:
        our.view = Job("a", "b", "c").view()
    assert told(our) == []
    assert told(our, LEASE_ENDS) == []


def test_coordinator_without_a_known_round_sends_no_number() -> None:
    our = member()
    our.view = Job("a", "b", "c").view()
    our.coordinator.active = True
    assert told(our) == []
