"""Single request that may be under way, and the pauses after failed ones."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.protocol.clock import Alarm
from elasticjob_rendezvous.protocol.effects import Read
from elasticjob_rendezvous.protocol.kv import KeyValue, Range
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.replica import View
from elasticjob_rendezvous.protocol.requests import Backoff, InFlight
from elasticjob_rendezvous.protocol.watches import Watches
from tests.unit.rendezvous.builders import KEYS, a_round

WHOLE = Range(KEYS.prefix, prefix=True)
READ = Read((WHOLE,))


def test_log_text_of_failed_write_is_not_used_for_the_next() -> None:
    inflight = InFlight(Read((Range("/job/"),)), note="round 2 is final")
    inflight.taken()
    assert (inflight.request, inflight.note) == (None, "")


CLUSTER, OTHER = 7, 8
HISTORIES = {
    "nothing is known yet": (0, OTHER, 1, False),
    "the same store, as far as before": (CLUSTER, CLUSTER, 5, False),
    "the same store, further": (CLUSTER, CLUSTER, 6, False),
    "the same store, less far": (CLUSTER, CLUSTER, 4, True),
    "another store, less far": (CLUSTER, OTHER, 4, True),
    "another store, further": (CLUSTER, OTHER, 9, True),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_answer_of_another_store_or_an_older_revision_shows_data_loss(name: str) -> None:
    known, cluster, revision, lost = HISTORIES[name]
    view = View(KEYS)
    view.cluster_id, view.revision = known, 5
    inflight = InFlight()
    inflight.send(READ, view, Watches())
    assert inflight.shows_data_loss(view, Watches(), cluster, revision, ()) is lost


@pytest.mark.parametrize(
    ("found", "revision", "lost"), [(2, 6, True), (3, 6, False), (2, 2, False)]
)
def test_key_that_goes_back_to_an_older_revision_shows_data_loss(
    found: int, revision: int, lost: bool
) -> None:
    view = View(KEYS)
    view.cluster_id = CLUSTER
    view.absorb(3, [(WHOLE, (KeyValue(KEYS.round, encode(a_round(1)), 1, 3),))])
    view.revision = 0  # only the keys of the answer show the loss
    inflight = InFlight()
    inflight.send(READ, view, Watches())
    ranges = ((WHOLE, (KeyValue(KEYS.round, encode(a_round(1)), 1, found),)),)
    assert inflight.shows_data_loss(view, Watches(), CLUSTER, revision, ranges) is lost


def test_answer_counts_only_under_the_watch_of_its_request() -> None:
    watches, inflight = Watches(), InFlight()
    watches.keep_main((WHOLE,), 0.0, Alarm())
    watches.opened(1, 5, CLUSTER)
    inflight.send(READ, View(KEYS), watches)
    assert (inflight.request, inflight.under) == (READ, 1)
    assert inflight.is_up_to_date(watches)
    watches.broke(1, 0.0)
    assert not inflight.is_up_to_date(watches)


def test_pauses_double_up_to_two_seconds_and_end_with_an_answer() -> None:
    backoff = Backoff(jitter=1.0)
    pauses = []
    for _ in range(7):
        pauses.append(backoff.pause_seconds)
        backoff.failed(10.0)
        assert backoff.until == 10.0 + pauses[-1]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    backoff.answered()
    assert (backoff.until, backoff.pause_seconds) == (0.0, 0.1)


def test_jitter_shortens_a_pause_to_half() -> None:
    assert Backoff(jitter=0.0).pause_seconds == 0.05
    assert Backoff(jitter=0.5).pause_seconds == pytest.approx(0.075)


def test_longer_pause_starts_with_the_next_failure() -> None:
    backoff = Backoff(jitter=1.0)
    backoff.lengthen()
    assert (backoff.until, backoff.pause_seconds) == (0.0, 0.2)
