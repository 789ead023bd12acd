"""Single request that may be under way."""

from __future__ import annotations

from elasticjob_rendezvous.protocol.effects import Read
from elasticjob_rendezvous.protocol.kv import Range
from elasticjob_rendezvous.protocol.requests import InFlight


def test_log_text_of_failed_write_is_not_used_for_the_next() -> None:
    inflight = InFlight(Read((Range("/job/"),)), note="round 2 is final")
    inflight.taken()
    assert (inflight.request, inflight.note) == (None, "")
