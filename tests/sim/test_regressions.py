"""Regression schedules: seeds that once violated an invariant."""

from __future__ import annotations

import pytest

from tests.sim import schedule
from tests.sim.run import report, simulate

FIRST_KINDS = (
    "chaos",
    "churn",
    "crashes",
    "etcd-trouble",
    "finishing",
    "hung",
    "outlived",
    "partition",
    "pause",
    "quiet",
    "scale",
)
"""Kinds of runs at the time these seeds were found: the kind of a seed rotates through them."""

FOUND = {
    "an agent away while etcd loses its data": 732259,
    "forgotten by etcd long after the lease, with a link that falls silent": 1904316,
    "the key of an earlier agent goes just before the round is sealed": 1900962,
    "an agent that hung starts what was given up for want of it": 1902147,
    "who was to join is gone when all have saved for it": 2502104,
    "the watch of the coordinator's key breaks as one takes over": 2503193,
    "an agent without a launcher hangs before it has a link": 2505849,
    "or when its link had gone before": 4201653,
    "the next coordinator does not know who was fenced": 1911169,
    "who is told to go cannot say that it goes": 12000692,
    "etcd loses a round that was sealed, before anybody heard of it": 12005205,
    "etcd loses its data, and who alone knows of the last round comes back late": 5304137,
    "who leaves can't write it until the verdict on its peers is due": 17000137,
    "between two cuts only one side of a link is heard": 24007826,
    "etcd loses its data under a gang that outlives it, one of which is slow to register": 24007536,
    "a watch stays on the etcd whose data was lost, before anything was read": 16000127,
    "an agent of a gang without etcd ends and begins anew, just before etcd is back": 4006140,
}


@pytest.mark.parametrize("name", FOUND)
def test_found_schedule_breaks_no_invariant(name: str) -> None:
    seed = FOUND[name]
    kind = FIRST_KINDS[seed % len(FIRST_KINDS)]
    result = simulate(seed, plan=schedule.plan(seed, kind))
    if result.violation is not None:
        pytest.fail(report(result), pytrace=False)


def test_coordinator_outside_the_round_waits_for_links_to_its_predecessor() -> None:
    """The predecessor's requests do not reach etcd; a member that returned was linked to it."""
    result = simulate(6926, plan=schedule.plan(6926, "one-way"))
    if result.violation is not None:
        pytest.fail(report(result), pytrace=False)


def test_coordinator_with_a_silent_watch_does_not_charge_a_loss() -> None:
    """A member is lost before it has a link; the coordinator learns of it by a new read alone."""
    result = simulate(930029, plan=schedule.plan(930029, "refusing"))
    if result.violation is not None:
        pytest.fail(report(result), pytrace=False)
