"""Registry of the etcds that jobs name."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from elasticjob_operator.model import ElasticJob, parse_manifest
from elasticjob_operator.rendezvous.etcd_registry import EtcdRegistry
from elasticjob_operator.rendezvous.informer_cache import InformerCache
from elasticjob_operator.settings import EtcdSettings
from tests.integration.kube_helpers import elasticjob

ENDPOINT = "http://127.0.0.1:9"


class Secrets:
    """API server with one Secret."""

    def __init__(self) -> None:
        self.password = b"mistyped"

    async def get(self, *_: object) -> dict[str, Any]:
        return {"data": {"password": base64.b64encode(self.password).decode()}}


def job_of(uid: str) -> ElasticJob:
    raw = elasticjob("job")
    raw["metadata"]["uid"] = uid
    raw["spec"]["rendezvous"] = {"endpoints": [ENDPOINT], "secretName": "etcd"}
    return parse_manifest(raw)


def test_job_waits_for_the_etcd_that_replaced_another_during_its_first_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job that waited for the replaced one would never be woken."""
    secrets = Secrets()

    async def main() -> set[str]:
        async with asyncio.TaskGroup() as tasks:
            settings = EtcdSettings((ENDPOINT,), allowed=frozenset({ENDPOINT}))
            etcds = EtcdRegistry(settings, secrets, tasks, lambda *_: None)  # type: ignore[arg-type]

            async def reached(*_: object) -> bool:
                if secrets.password == b"mistyped":
                    secrets.password = b"right"
                    await etcds.of(job_of("second"))
                return False

            monkeypatch.setattr(InformerCache, "reached", reached)
            await etcds.of(job_of("first"))
            waiting = {uid for _, uid in etcds.all()[1].waiting}
            await etcds.aclose()
        return waiting

    assert asyncio.run(main()) == {"first", "second"}
