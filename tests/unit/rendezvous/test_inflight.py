"""Single request that may be under way."""

from __future__ import annotations

from elasticjob_rendezvous.core.effects import Read
from elasticjob_rendezvous.core.inflight import InFlight
from elasticjob_rendezvous.core.kv import Range


def test_log_text_of_failed_write_is_not_used_for_the_next() -> None:
    inflight = InFlight(Read((Range("/job/"),)), note="round 2 is final")
    inflight.taken()
    assert (inflight.request, inflight.note) == (None, "")
