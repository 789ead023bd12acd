"""Evidence and its ends: for our workers, and for those who rely on what our links tell them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.clock import Alarm
from elasticjob_rendezvous.protocol.config import Config, Identity
from elasticjob_rendezvous.protocol.effects import Serve
from elasticjob_rendezvous.protocol.events import Clock, LinkHeartbeat, PeerHeartbeat
from elasticjob_rendezvous.protocol.liveness.failure_detector import (
    LINK_SILENCE_SECONDS,
    RELAY_SECONDS,
    TRUST_SECONDS,
)
from elasticjob_rendezvous.protocol.liveness.worker_deadlines import (
    evidence_until,
    live_until,
    may_workers_continue,
    serve_round,
)
from elasticjob_rendezvous.protocol.records.members import RoundState
from elasticjob_rendezvous.protocol.state import EngineState
from elasticjob_rendezvous.protocol.worker_group import Local, Workers
from tests.unit.rendezvous.builders import KEYS, Job, identity

A, B, C = (identity(name) for name in "abc")
NOW = 100.0
LEASE_ENDS = 102.0
ROUND = 4
NEVER = -math.inf


def member(round: int = ROUND, **local: Any) -> EngineState:
    """Member a of a gang of three in round 4, whose lease ends soon; without any evidence."""
    engine_state = EngineState(Config(KEYS.prefix, Identity(A, "a", "host-a", 7000, 7001), "n-a"))
    engine_state.clock = Clock(NOW, 0)
    engine_state.view = Job("a", "b", "c").sealed("a", "b", "c", number=ROUND).view()
    engine_state.rounds.update(engine_state.view)
    engine_state.worker_group.report(
        Local(ready=True, workers=Workers.RUNNING, round=round, **local)
    )
    engine_state.self_fencing.backed_until = LEASE_ENDS
    engine_state.sessions = 1
    return engine_state


def follows(engine_state: EngineState, number: int, sent: float = NOW) -> EngineState:
    """Its coordinator spoke on its link."""
    engine_state.leader_link.link = (B, "s1")
    engine_state.leader_link.link_heartbeat(LinkHeartbeat(B, "s1", number, sent), NOW)
    return engine_state


def leads(engine_state: EngineState, *heard: str, sent: float = NOW) -> EngineState:
    """Members spoke on their links to it."""
    for id in heard:
        engine_state.coordinator.peers.up(PeerHeartbeat(id, "s1", sent), NOW)
    return engine_state


# -- our workers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine_state", "until"),
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
def test_worker_deadline_is_the_latest_end_of_evidence(
    engine_state: EngineState, until: float
) -> None:
    assert live_until(engine_state) == pytest.approx(until)


@pytest.mark.parametrize(
    ("sessions", "found", "until"),
    [(0, NOW + 60, NEVER), (0, None, LEASE_ENDS), (1, NOW + 60, LEASE_ENDS)],
    ids=["not registered yet", "their launcher holds none", "registered"],
)
def test_found_deadline_is_kept_before_registration(
    sessions: int, found: float | None, until: float
) -> None:
    """No other member knows of evidence from before the first key."""
    engine_state = member(live_until=found)
    engine_state.sessions = sessions
    assert live_until(engine_state) == until


def test_found_workers_live_by_links_before_registration() -> None:
    engine_state = follows(member(live_until=NOW + 60), ROUND)
    engine_state.sessions = 0
    assert live_until(engine_state) == pytest.approx(NOW + TRUST_SECONDS)
    old = follows(member(ROUND - 1, live_until=NOW + 60), ROUND)
    old.sessions = 0
    assert live_until(old) == NEVER


@pytest.mark.parametrize(
    ("state", "ends"),
    [(RoundState.CLOSED, False), (RoundState.FINAL, True), (RoundState.JOINABLE, True)],
)
def test_closed_job_has_no_newer_round_to_stop_its_workers(state: RoundState, ends: bool) -> None:
    engine_state = member()
    engine_state.view = Job("a", "b", "c").round(ROUND, state).view()
    assert math.isfinite(live_until(engine_state)) is ends


def test_worker_deadline_uses_links_of_members_that_are_not_done() -> None:
    engine_state = leads(member(), B)
    engine_state.view = (
        Job("a", "b", "c").sealed("a", "b", "c", number=ROUND).done("c", round=ROUND).view()
    )
    assert live_until(engine_state) == pytest.approx(NOW + TRUST_SECONDS)


@pytest.mark.parametrize(
    ("engine_state", "until"),
    [
        (member(), LEASE_ENDS),
        (follows(member(), ROUND), NOW + TRUST_SECONDS),
        (follows(member(ROUND - 1), ROUND), LEASE_ENDS),
        (leads(member(), B, C), NOW + TRUST_SECONDS),
    ],
    ids=["by their lease", "by a link", "an older round's", "by the whole gang"],
)
def test_workers_continue_until_their_evidence_ends(
    engine_state: EngineState, until: float
) -> None:
    engine_state.clock, engine_state.alarm = Clock(until - 0.1, 0), Alarm()
    assert may_workers_continue(engine_state)
    assert engine_state.alarm.at == pytest.approx(until), "they are looked at again then"
    engine_state.clock = Clock(until + 0.001, 0)
    assert not may_workers_continue(engine_state)


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
    engine_state = member(live_until=found)
    engine_state.worker_group.report(
        Local(ready=True, workers=workers, round=ROUND, live_until=found)
    )
    engine_state.sessions, engine_state.self_fencing.backed_until = sessions, 0.0
    assert may_workers_continue(engine_state) is goes_on
    assert engine_state.alarm.at is None


# -- what others may rely on ----------------------------------------------------------


@pytest.mark.parametrize(
    ("engine_state", "until"),
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
def test_relayed_evidence_is_the_longest_lasting_one(
    engine_state: EngineState, until: float
) -> None:
    assert evidence_until(engine_state) == pytest.approx(until)


def test_done_member_need_not_be_heard() -> None:
    engine_state = leads(member(), B)
    engine_state.view = (
        Job("a", "b", "c").sealed("a", "b", "c", number=ROUND).done("c", round=ROUND).view()
    )
    assert evidence_until(engine_state) == pytest.approx(NOW + TRUST_SECONDS + RELAY_SECONDS)
    engine_state.view = (
        Job("a", "b", "c").sealed("a", "b", "c", number=ROUND).done("c", round=3).view()
    )
    assert evidence_until(engine_state) == LEASE_ENDS, "it was done in an older round"


def test_last_working_member_relays_evidence_of_a_refusing_etcd() -> None:
    engine_state = member()
    engine_state.view = (
        Job("a", "b", "c").sealed("a", "b", "c", number=ROUND).done("b", "c", round=ROUND).view()
    )
    assert evidence_until(engine_state) == LEASE_ENDS
    engine_state.self_fencing.store_refused_at = NOW
    assert evidence_until(engine_state) == pytest.approx(NOW + LINK_SILENCE_SECONDS + RELAY_SECONDS)


@pytest.mark.parametrize("number", [None, ROUND + 1], ids=["no round", "a newer round"])
def test_gang_is_no_evidence_for_a_round_of_others(number: int | None) -> None:
    job = Job("a", "b", "c")
    engine_state = leads(member(), B, C)
    engine_state.view = (job if number is None else job.round(number)).view()
    assert evidence_until(engine_state) == LEASE_ENDS


def test_first_gang_is_no_evidence_while_its_round_is_unknown() -> None:
    """Etcd lost its data: what number comes next is yet to be read."""
    engine_state = leads(member(), B, C)
    engine_state.view = Job("a", "b", "c").sealed("a", "b", "c", number=1).view()
    engine_state.rounds.update(engine_state.view)
    assert evidence_until(engine_state) == pytest.approx(NOW + TRUST_SECONDS + RELAY_SECONDS)
    engine_state.view = Job("a", "b", "c").view()
    assert evidence_until(engine_state) == LEASE_ENDS


# -- the number that others are told --------------------------------------------------


def told(engine_state: EngineState, now: float = NOW) -> list[int]:
    """The numbers that those who link to it are told now."""
    engine_state.clock, engine_state.alarm, engine_state.effects = Clock(now, 0), Alarm(), []
    serve_round(engine_state)
    assert all(isinstance(effect, Serve) for effect in engine_state.effects)
    return [effect.round for effect in engine_state.effects if isinstance(effect, Serve)]


def test_coordinator_sends_its_round_once_and_a_higher_number_after_its_evidence() -> None:
    engine_state = member()
    engine_state.coordinator.active = True
    assert told(engine_state) == [ROUND]
    assert engine_state.alarm.at == LEASE_ENDS
    assert told(engine_state) == []
    assert told(engine_state, LEASE_ENDS) == [ROUND + 1]
    assert told(engine_state, LEASE_ENDS + 1) == []
    engine_state.self_fencing.backed_until = LEASE_ENDS + 9
    assert told(engine_state, LEASE_ENDS + 2) == [ROUND]


@pytest.mark.parametrize(
    ("engine_state", "until"),
    [(follows(member(), ROUND), NOW + TRUST_SECONDS), (leads(member(), B, C), NOW + TRUST_SECONDS)],
    ids=["by its own coordinator's link", "by the links of its gang"],
)
def test_coordinator_with_expired_lease_sends_its_round_while_links_are_evidence(
    engine_state: EngineState, until: float
) -> None:
    engine_state.coordinator.active = True
    assert told(engine_state, until - 0.1) == [ROUND]
    assert engine_state.alarm.at == pytest.approx(until)
    assert told(engine_state, until + 0.001) == [ROUND + 1]


def test_former_coordinator_without_evidence_sends_a_higher_number() -> None:
    engine_state = member()
    engine_state.coordinator.active = True
    assert told(engine_state) == [ROUND]
    engine_state.coordinator.resign()
    assert told(engine_state, LEASE_ENDS) == [ROUND + 1]


@pytest.mark.parametrize("knows", [True, False], ids=["it never coordinated", "nor a round"])
def test_member_that_never_coordinated_sends_no_number(knows: bool) -> None:
    engine_state = member()
    if not knows:
        engine_state.view = Job("a", "b", "c").view()
    assert told(engine_state) == []
    assert told(engine_state, LEASE_ENDS) == []


def test_coordinator_without_a_known_round_sends_no_number() -> None:
    engine_state = member()
    engine_state.view = Job("a", "b", "c").view()
    engine_state.coordinator.active = True
    assert told(engine_state) == []
