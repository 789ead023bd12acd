"""Reconciliation of a job, composed of parts that the test plays."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from elasticjob_operator.core.actions import CreatePod
from elasticjob_operator.core.mirrored import Records, rendezvous_view
from elasticjob_operator.core.observed import Observed, Sight
from elasticjob_operator.core.status import next_status
from elasticjob_operator.jobs import JobKey, Jobs
from elasticjob_operator.kube import Conflict, KubeError, Unreachable
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.reconcile import Parts, Reconciler
from elasticjob_operator.task import Applied
from elasticjob_operator.wakeups import Retry
from elasticjob_rendezvous.core.costs import History
from elasticjob_rendezvous.core.records import Cause, CauseKind, Round, RoundState
from tests.unit.operator.builders import NOW, job, manifest, observed
from tests.unit.operator.fake_source import FakeSource

KEY = JobKey("default", "job")
MADE = CreatePod(0, "job-0", 1)


class Played:
    """Fakes of all parts of a reconcile; the status update fails with the given error."""

    def __init__(self, error: KubeError, found: Records | None = None) -> None:
        self.error: KubeError | None = error
        self.found = found
        self.status: dict[str, Any] = {}
        self.told: list[str] = []

    async def get(self, *_: object) -> dict[str, Any]:
        raw = manifest(nodes=4)
        raw["metadata"] |= {"namespace": "default", "resourceVersion": "7"}
        return raw | {"status": self.status}

    async def patch(self, *_: object, **__: object) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        return {"metadata": {"resourceVersion": "8"}}

    async def of(self, _: object) -> FakeSource:
        return FakeSource()

    async def look(self, *_: object) -> Sight:
        return Sight(observed())

    def look_again(self, *_: object) -> Observed:
        return Observed(rendezvous=rendezvous_view(self.found)) if self.found else observed()

    async def apply(self, *_: object) -> Applied:
        return Applied(actions=[MADE])

    def tell(self, _: object, found: Any) -> None:
        self.told += [said.reason for said in found]


def looker(played: Any) -> Reconciler:
    jobs = Jobs(lambda: 0.0, lambda: 0.0)
    parts = Parts(
        played, jobs, played, played, played, SimpleNamespace(), played, Metrics(),  # type: ignore[arg-type]
        lambda: 0.0, lambda: NOW,
    )  # fmt: skip
    return Reconciler(parts)


@pytest.mark.parametrize(
    "error",
    [Conflict("patch", "it has changed"), Unreachable("patch", "no answer")],
    ids=["changed", "no answer"],
)
def test_what_was_done_is_told_though_the_status_could_not_be_written(error: KubeError) -> None:
    played: Any = Played(error)
    look = looker(played).look(KEY)
    if isinstance(error, Conflict):
        assert asyncio.run(look) == 0.0, "again, at once"
    else:
        with pytest.raises(Retry):
            asyncio.run(look)
    assert played.told == ["PodsCreated"]


@pytest.mark.parametrize("written", [True, False], ids=["was written", "was not"])
def test_what_a_status_says_is_told_once_though_its_answer_was_lost(written: bool) -> None:
    start = Cause(CauseKind.START)
    found = Records(
        "/elasticjob/default/job-uid/1/",
        round=Round(1, RoundState.FINAL, start, nodes=2),
        histories={1: History(1, start, 2)},
    )
    status = next_status(job(), observed(), rendezvous_view(found), NOW)
    document = status.model_dump(mode="json", by_alias=True, exclude_none=True)
    played: Any = Played(Unreachable("patch", "no answer"), found)
    reconciler = looker(played)
    for _ in range(2):  # lost, and lost again
        with pytest.raises(Retry):
            asyncio.run(reconciler.look(KEY))
    assert set(played.told) == {"PodsCreated"}
    played.error = None
    played.status = document if written else {}
    for _ in range(2):
        asyncio.run(reconciler.look(KEY))
        played.status = document
    assert [played.told.count(reason) for reason in ("RoundFinal", "Running")] == [1, 1]
