"""Unmodified torchrun and ElasticJob nodes in one gang, training, through changes of membership.

`python -m bench.interop` does the same for twenty changes and every mix: docs/interop.md.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench.interop import put_through
from bench.mixed.backends import BACKENDS, MixedBackend
from bench.mixed.gang import mixed_gang
from bench.mixed.plan import Change, Kind, Mix, Side

pytestmark = pytest.mark.timeout(900)
LIMIT_SECONDS = 300.0
"""Time limit of one change; each imports torch in every worker, perhaps on a busy machine."""

JOIN, DRAIN = Kind.JOIN, Kind.DRAIN
WORKER, NODE = Kind.WORKER_KILLED, Kind.NODE_KILLED
OURS, THEIRS = Side.OURS, Side.THEIRS

PLANS = {
    "etcd": (OURS, ((JOIN, THEIRS), (WORKER, OURS), (NODE, THEIRS), (JOIN, OURS), (DRAIN, OURS))),
    # The first node hosts the common store, under a plain torchrun as under ours.
    "c10d": (THEIRS, ((JOIN, OURS), (NODE, OURS), (JOIN, THEIRS), (WORKER, OURS), (DRAIN, THEIRS))),
    "etcd-v2": (OURS, ((JOIN, THEIRS), (WORKER, OURS), (NODE, THEIRS))),
    "elasticjob": (OURS, ((JOIN, THEIRS), (WORKER, THEIRS), (NODE, OURS))),
}


def steady(backend: MixedBackend) -> MixedBackend:
    """Tolerate longer silences: on a busy machine a torchrun may be silent for three seconds.
    Others would consider it lost, and it would not notice their next round before its worker's own
    timeout.
    """
    longer = {"keep_alive_max_attempt": "30"}
    known = {name: value for name, value in longer.items() if name in backend.conf}
    return replace(backend, conf={**backend.conf, **known})


@pytest.mark.parametrize("name", list(PLANS))
def test_mixed_gang_trains_through_joins_and_losses(name: str, tmp_path: Path) -> None:
    first, steps = PLANS[name]
    plan = [Change(kind, side) for kind, side in steps]
    mix = Mix(1, 1) if name != "elasticjob" else Mix(2, 1)
    with mixed_gang(steady(BACKENDS[name]), tmp_path / "logs") as gang:
        outcomes = put_through(gang, mix, plan, first, LIMIT_SECONDS)
        errors = [outcome for outcome in outcomes if outcome.error]
        assert not errors, f"{errors}\n{gang.output()}"
    assert [each.change for each in outcomes] == ["start", *map(str, plan), "finish"]
