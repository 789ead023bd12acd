"""Application of a plan, against an API server whose answers the test plays."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from elasticjob_operator.apply import Applier
from elasticjob_operator.core.access import Access
from elasticjob_operator.core.actions import CreatePod
from elasticjob_operator.core.observed import Sight
from elasticjob_operator.core.pod import PodSettings
from elasticjob_operator.jobs import JobKey, JobMemory, OwnedMemory
from elasticjob_operator.kube import AlreadyExists, NotFound
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.task import Task
from elasticjob_operator.wakeups import Retry
from tests.unit.operator.builders import NOW, job, observed
from tests.unit.operator.fake_source import FakeSource


class Vanishing:
    """API server whose pod name is taken at creation and absent at the next read."""

    async def create(self, *_: object, **__: object) -> None:
        raise AlreadyExists("create pods", "pods job-0 already exists")

    async def get(self, *_: object) -> None:
        raise NotFound("get pods", "pods job-0 not found")

    async def ensure(self, *_: object, **__: object) -> None: ...

    async def ensure_budget(self, *_: object) -> None: ...


def test_a_name_that_was_taken_a_moment_ago_is_tried_again() -> None:
    """The end of a foreign pod triggers no reconcile."""
    played: Any = Vanishing()
    applier = Applier(played, played, PodSettings("sidecar:1"), Metrics(), lambda: NOW)
    memory = JobMemory(JobKey("default", "job"), "job-uid")
    memory.owned = OwnedMemory(Access(b"k", None, None, None))
    task = Task(job(), memory, FakeSource(), Sight(observed()))
    planned: Any = SimpleNamespace(actions=(CreatePod(0, "job-0", 1),), bounds=None)
    applied = asyncio.run(applier.apply(task, planned))
    assert isinstance(applied.error, Retry)
    assert applied.foreign == set()
