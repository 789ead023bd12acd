"""A look at a job, put together of parts that the test plays."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from elasticjob_operator.apply import Applied
from elasticjob_operator.core.actions import CreatePod
from elasticjob_operator.jobs import JobKey, Jobs
from elasticjob_operator.kube import Conflict, KubeError, Unreachable
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.observe import Sight
from elasticjob_operator.reconcile import Parts, Reconciler
from elasticjob_operator.wakeups import Retry
from tests.unit.operator.builders import NOW, manifest, observed

KEY = JobKey("default", "job")
MADE = CreatePod(0, "job-0", 1)


class Played:
    """Every part of a look; the status cannot be written for the reason given."""

    def __init__(self, error: KubeError) -> None:
        self.error = error
        self.told: list[str] = []

    async def get(self, *_: object) -> dict[str, Any]:
        raw = manifest(nodes=4)
        raw["metadata"] |= {"namespace": "default", "resourceVersion": "7"}
        return raw

    async def patch(self, *_: object, **__: object) -> None:
        raise self.error

    async def of(self, _: object) -> None:
        return None

    async def look(self, *_: object) -> Sight:
        return Sight(observed())

    async def apply(self, *_: object) -> Applied:
        return Applied(actions=[MADE])

    def tell(self, _: object, found: Any) -> None:
        self.told += [said.reason for said in found]


@pytest.mark.parametrize(
    "error",
    [Conflict("patch", "it has changed"), Unreachable("patch", "no answer")],
    ids=["changed", "no answer"],
)
def test_what_was_done_is_told_though_the_status_could_not_be_written(error: KubeError) -> None:
    played: Any = Played(error)
    jobs = Jobs(lambda: 0.0, lambda: 0.0)
    parts = Parts(
        played, jobs, played, played, played, SimpleNamespace(), played, Metrics(),  # type: ignore[arg-type]
        lambda: 0.0, lambda: NOW,
    )  # fmt: skip
    look = Reconciler(parts).look(KEY)
    if isinstance(error, Conflict):
        assert asyncio.run(look) == 0.0, "again, at once"
    else:
        with pytest.raises(Retry):
            asyncio.run(look)
    assert played.told == ["PodsCreated"]
