"""Active watches, and the validity of reads under them."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.protocol.clock import Alarm
from elasticjob_rendezvous.protocol.effects import Effect, Unwatch, Watch
from elasticjob_rendezvous.protocol.kv import Range
from elasticjob_rendezvous.protocol.watches import Watches

NARROW = (Range("/job/state/", prefix=True),)
WIDE = (Range("/job/", prefix=True),)
CLUSTER = 1


def test_main_watch_is_opened_once_from_the_present() -> None:
    watches = Watches()
    assert watches.keep_main(NARROW, 0.0, Alarm()) == [Watch(1, NARROW, 0)]
    assert watches.keep_main(NARROW, 9.0, Alarm()) == []


def test_reads_do_not_count_before_the_watch_is_open() -> None:
    watches = Watches()
    watches.keep_main(NARROW, 0.0, Alarm())
    assert (watches.ready, watches.reading_under) == (False, 0)
    assert not watches.kept(watches.reading_under)
    watches.opened(1, 5, CLUSTER)
    assert (watches.ready, watches.reading_under) == (True, 1)
    assert watches.kept(1)


def test_read_sent_under_an_older_watch_does_not_count() -> None:
    watches = Watches()
    watches.keep_main(NARROW, 0.0, Alarm())
    watches.opened(1, 5, CLUSTER)
    assert watches.keep_main(WIDE, 1.0, Alarm()) == [Unwatch(1), Watch(2, WIDE, 0)]
    watches.opened(1, 5, CLUSTER)  # the old watch's late answer
    assert not watches.ready
    assert not watches.kept(1)
    watches.opened(2, 6, CLUSTER)
    assert watches.kept(2)


def test_narrower_watch_is_replaced_at_once_even_after_another_broke() -> None:
    """A new coordinator must not decide on its knowledge as a plain member."""
    watches = Watches()
    watches.keep_main(NARROW, 0.0, Alarm())
    watches.opened(1, 5, CLUSTER)
    watches.keep_leader("/job/members/a/s", 4, 0.0, Alarm())
    assert watches.broke(2, retry_at=9.0)
    assert watches.keep_main(WIDE, 1.0, Alarm()) == [Unwatch(1), Watch(3, WIDE, 0)]
    assert not watches.ready
    assert watches.keep_leader("/job/members/a/s", 4, 1.0, Alarm()) == []


@pytest.mark.parametrize(("revision", "ahead"), [(4, True), (5, False), (6, False)])
def test_read_under_a_watch_is_not_older_than_the_watch(revision: int, ahead: bool) -> None:
    """A read from before the watch began comes from a store with another past."""
    watches = Watches()
    watches.keep_main(NARROW, 0.0, Alarm())
    assert not watches.has_another_past(1, revision, CLUSTER)  # its beginning is unknown
    watches.opened(1, 5, CLUSTER)
    assert watches.has_another_past(1, revision, CLUSTER) is ahead


def test_watch_is_not_compared_with_a_read_under_another() -> None:
    watches = Watches()
    assert not watches.has_another_past(0, 4, CLUSTER)
    watches.keep_main(NARROW, 0.0, Alarm())
    watches.opened(1, 5, CLUSTER)
    assert not watches.has_another_past(0, 4, CLUSTER)
    watches.keep_main(WIDE, 1.0, Alarm())
    watches.opened(1, 9, CLUSTER)
    watches.opened(2, 7, CLUSTER)
    assert not watches.has_another_past(1, 4, CLUSTER)
    assert watches.has_another_past(2, 6, CLUSTER)
    assert not watches.has_another_past(2, 7, CLUSTER)


def test_watch_on_a_recreated_etcd_has_another_past() -> None:
    """The watch would be silent forever, at any revision."""
    watches = Watches()
    watches.keep_main(NARROW, 0.0, Alarm())
    watches.opened(1, 5, CLUSTER)
    assert watches.has_another_past(1, 6, CLUSTER + 1)
    assert not watches.has_another_past(1, 6, CLUSTER)


def watched(effects: list[Effect]) -> list[tuple[int, str, int]]:
    """Return (generation, key, from revision) of each watch that was opened."""
    return [
        (effect.generation, effect.ranges[0].key, effect.revision)
        for effect in effects
        if isinstance(effect, Watch)
    ]


def test_coordinator_key_is_watched_from_the_revision_after_the_last_seen() -> None:
    watches = Watches()
    assert watched(watches.keep_leader("/job/a", 41, 0.0, Alarm())) == [(1, "/job/a", 42)]
    assert watches.keep_leader("/job/a", 60, 0.0, Alarm()) == []
    effects = watches.keep_leader("/job/b", 60, 0.0, Alarm())
    assert watched(effects) == [(2, "/job/b", 61)]
    assert Unwatch(1) in effects
    assert watches.keep_leader("", 0, 0.0, Alarm()) == [Unwatch(2)]
    assert watches.keep_leader("", 0, 0.0, Alarm()) == []


def test_broken_watch_is_reopened_after_a_pause() -> None:
    watches, alarm = Watches(), Alarm()
    watches.keep_main(NARROW, 0.0, alarm)
    watches.opened(1, 5, CLUSTER)
    assert watches.broke(1, retry_at=2.0)
    assert not watches.ready
    assert watches.keep_main(NARROW, 1.0, alarm) == []
    assert alarm.at == 2.0
    assert watches.keep_main(NARROW, 2.0, alarm) == [Watch(2, NARROW, 0)]


def test_event_of_a_closed_watch_is_ignored() -> None:
    watches = Watches()
    watches.keep_main(NARROW, 0.0, Alarm())
    watches.keep_leader("/job/a", 1, 0.0, Alarm())
    assert [watches.holds(generation) for generation in (0, 1, 2, 3)] == [False, True, True, False]
    assert watches.broke(2, retry_at=0.0)
    assert not watches.broke(2, retry_at=0.0)
    assert watches.main is not None
    assert watches.drop() == [Unwatch(1)]
    assert not watches.holds(1)


@pytest.mark.parametrize("revision", [0, 1, 4])
def test_watch_of_the_coordinators_key_is_for_deletions_alone(revision: int) -> None:
    watches, key = Watches(), "/job/members/a/s"
    assert watches.keep_leader(key, revision, 0.0, Alarm()) == [
        Watch(1, (Range(key),), revision + 1, deletions_only=True)
    ]


def test_dropped_watches_are_both_closed() -> None:
    watches = Watches()
    watches.keep_main(NARROW, 0.0, Alarm())
    watches.keep_leader("/job/members/a/s", 4, 0.0, Alarm())
    assert watches.drop() == [Unwatch(1), Unwatch(2)]
    assert (watches.main, watches.leader) == (None, None)
