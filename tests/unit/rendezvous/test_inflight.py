"""Single request that may be under way."""

from __future__ import annotations

from elasticjob_rendezvous.core.effects import Read
from elasticjob_rendezvous.core.inflight import InFlight
from elasticjob_rendezvous.core.kv import Range


def test_what_a_write_that_failed_was_to_say_is_not_said_of_the_next() -> None:
    inflight = InFlight(Read((Range("/job/"),)), note="round 2 is final")
    inflight.taken()
    assert (inflight.request, inflight.note) == (None, "")
