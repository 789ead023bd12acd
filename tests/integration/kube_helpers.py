"""Helpers for tests on the API server: scenarios, and small valid objects."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from typing import Any

from elasticjob_operator.kubernetes.client import Kube
from tests.integration.apiserver import ADMIN, ApiServer

Json = dict[str, Any]
ELASTICJOBS_PATH = "/apis/elasticjob.dev/v1alpha1/namespaces/{}/elasticjobs"


def run(
    server: ApiServer,
    scenario: Callable[[Kube], Awaitable[None]],
    user: str = ADMIN,
    call_seconds: float = 10.0,
) -> None:
    """Run the scenario with a client of the product."""

    async def main() -> None:
        async with server.connect(user, call_seconds) as kube:
            await scenario(kube)

    asyncio.run(main())


def pod(name: str, **spec: Any) -> Json:
    container = {"name": "trainer", "image": "trainer:1"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "training"}},
        "spec": {"containers": [container], **spec},
    }


def elasticjob(name: str = "job", **spec: Any) -> Json:
    """Return a valid manifest with these fields of the spec set."""
    container = {"name": "trainer", "image": "trainer:1", "command": ["python3", "train.py"]}
    fields = {"minNodes": 1, "maxNodes": 4, "template": {"spec": {"containers": [container]}}}
    return {
        "apiVersion": "elasticjob.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": copy.deepcopy(fields | spec),
    }
