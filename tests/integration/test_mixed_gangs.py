"""Unmodified torchrun and our nodes in one gang, training, through changes of membership.

`python -m bench.interop` does the same for twenty changes and every mix: docs/interop.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.interop import put_through
from bench.mixed.backends import BACKENDS
from bench.mixed.gang import mixed_gang
from bench.mixed.plan import Change, Kind, Mix, Side

pytestmark = pytest.mark.timeout(600)
LIMIT_SECONDS = 150.0
"""Of one change; each imports torch in every worker, perhaps on a busy machine."""

CHANGES = (
    Change(Kind.JOIN, Side.THEIRS),
    Change(Kind.WORKER_KILLED, Side.OURS),
    Change(Kind.NODE_KILLED, Side.THEIRS),
    Change(Kind.JOIN, Side.OURS),
    Change(Kind.DRAIN, Side.OURS),
)


@pytest.mark.parametrize("name", ["etcd"])
def test_a_gang_of_both_trains_on_through_joins_and_losses(name: str, tmp_path: Path) -> None:
    with mixed_gang(BACKENDS[name], tmp_path / "logs") as gang:
        outcomes = put_through(gang, Mix(1, 1), CHANGES, Side.OURS, LIMIT_SECONDS)
        errors = [outcome for outcome in outcomes if outcome.error]
        assert not errors, f"{errors}\n{gang.output()}"
    assert [outcome.change for outcome in outcomes] == [
        "start", *(str(change) for change in CHANGES), "finish"
    ]  # fmt: skip
