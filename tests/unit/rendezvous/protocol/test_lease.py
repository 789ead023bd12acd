"""Own lease: held until it has certainly expired, renewed in good time."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.protocol.clock import Alarm, Timers
from elasticjob_rendezvous.protocol.lease import OVERDUE_SECONDS, Lease


def granted(deadline: float = 106.0, now: float = 100.0) -> Lease:
    lease = Lease(ttl_seconds=6)
    lease.grant(7, deadline, now)
    return lease


def test_without_lease_there_is_no_deadline() -> None:
    assert not Lease(deadline=200.0).holds(100.0)
    assert not Lease().due(1e9)


def test_lease_is_valid_before_its_deadline_only() -> None:
    assert granted().holds(105.999)
    assert not granted().holds(106.0)


def test_lease_is_renewed_every_third_of_its_duration() -> None:
    lease, times = granted(), []
    for at in range(100, 107):
        if lease.due(at):
            lease.keep(at + 6.0)
            times.append(at)
    assert times == [102, 104, 106]


def test_unanswered_renewal_is_repeated_sooner() -> None:
    lease = granted()
    times = [at / 10 for at in range(1000, 1061) if lease.due(at / 10)]
    assert times == [102.0, 104.0, 105.0, 106.0]


@pytest.mark.parametrize(
    ("ttl_seconds", "left_seconds", "interval"),
    [
        (30, 30.0, 10.0),
        (30, 15.0, 10.0),
        (30, 14.9, OVERDUE_SECONDS),
        (3, 1.5, 1.0),
        (3, 1.4, 0.5),
    ],
)
def test_renewals_are_closer_once_half_of_the_lease_is_over(
    ttl_seconds: int, left_seconds: float, interval: float
) -> None:
    lease = Lease(ttl_seconds=ttl_seconds)
    lease.grant(7, deadline=100.0 + left_seconds, now=100.0)
    assert lease.renew_at == 100.0 + interval


def test_late_answer_of_older_renewal_does_not_shorten_the_lease() -> None:
    lease = granted()
    lease.keep(110.0)
    lease.keep(108.0)
    assert lease.holds(109.9)


def test_forgotten_lease_keeps_its_deadline() -> None:
    lease = granted()
    lease.forget()
    assert not lease.holds(101.0)
    assert not lease.due(200.0)
    assert (lease.id, lease.deadline) == (0, 106.0)


def test_alarm_is_the_earliest_requested_time() -> None:
    alarm = Alarm()
    alarm.set(None)
    assert alarm.at is None
    assert alarm.passed(5.0, now=5.0)
    assert alarm.at is None
    assert not alarm.passed(9.0, now=5.0)
    alarm.set(7.0)
    alarm.set(8.0)
    assert alarm.at == 7.0


def test_timer_starts_at_the_first_query_and_can_be_forgotten() -> None:
    timers = Timers()
    timers.begin_step(10.0)
    assert not timers.over("x", 5.0)
    assert timers.wake == 15.0
    timers.begin_step(14.0)
    assert timers.wake is None
    assert not timers.over("x", 5.0)
    assert timers.since("x") == 10.0
    timers.begin_step(15.0)
    assert timers.over("x", 5.0)
    timers.forget("x")
    assert timers.known("x") is None
    assert not timers.over("x", 5.0)
