"""Upkeep of a member without requests: renew, watch, link, probe, vouch, announce. No I/O."""

from __future__ import annotations

from elasticjob_rendezvous.core import farewells, succession
from elasticjob_rendezvous.core.effects import KeepAlive
from elasticjob_rendezvous.core.membership import Membership
from elasticjob_rendezvous.core.records import RoundState
from elasticjob_rendezvous.core.vouching import vouch


def tend(our: Membership) -> None:
    """Do what is due now, and set the alarm for what is due later."""
    our.departure.tell(bool(our.leaving), our.crew.idle, our.now)
    _renew(our)
    _tend_roles(our)
    vouch(our)
    farewells.tell(our)


def _renew(our: Membership) -> None:
    lease = our.lease
    if not lease.id:
        return
    if lease.due(our.now):
        our.effects.append(KeepAlive(lease.id))
    our.alarm.set(lease.renew_at)
    if our.now < lease.deadline:
        our.alarm.set(lease.deadline)


def _tend_roles(our: Membership) -> None:
    """Become or stop being the coordinator; watch and link accordingly."""
    stored = our.stored
    if stored is not None and our.lease.id:
        our.safety.backed_until = our.lease.deadline
    leads = stored is not None and our.leadership.key == stored.key
    if leads and not our.coordinator.active:
        succession.take_over(our)
    _tend_watches(our)
    our.coordinator.peers.inquiry_seconds = 2 * our.keep_alive_seconds
    if stored is None:
        if our.crew.idle:
            our.effects += our.leadership.unlink(our.now)  # nothing is left to vouch for
    elif our.coordinator.active:
        _tend_peers(our)
    else:
        _tend_leader(our)


def _tend_watches(our: Membership) -> None:
    """Watch everything as coordinator; else the job's state and the coordinator's key."""
    watches, leadership, now, alarm = our.watches, our.leadership, our.now, our.alarm
    leads = our.coordinator.active
    opened = watches.keep_main(our.everything if leads else our.shared, now, alarm)
    if opened:
        our.doubt = True
        our.effects += opened
    if leads or not leadership.key:
        our.effects += watches.keep_leader("", 0, now, alarm)
    elif not our.doubt and our.attendance.may_watch(our.round_is(RoundState.FINAL), now, alarm):
        our.effects += watches.keep_leader(leadership.key, leadership.seen_at, now, alarm)


def _tend_peers(our: Membership) -> None:
    """Look after the members, as the coordinator."""
    every = our.lease.ttl_seconds / 3
    me = our.config.identity.id
    effects, wake = our.coordinator.peers.tend(our.view, me, our.now, every)
    our.effects += effects
    our.alarm.set(wake)


def _tend_leader(our: Membership) -> None:
    """Look after the link to the coordinator, and probe it, as any other member."""
    now, alarm = our.now, our.alarm
    attend = our.attendance.may_link(our.round_is(RoundState.FINAL), now, alarm)
    our.effects += our.leadership.tend(our.view, now, our.doubt, attend)
    our.effects += our.coordinator.peers.tend_inquiries(our.view, now, alarm)
