"""Registry of the etcds that jobs name."""

from __future__ import annotations

import asyncio
import base64
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from elasticjob_operator.domain.observed.state import Obstacle
from elasticjob_operator.kubernetes.client import Forbidden, KubeError
from elasticjob_operator.model import ElasticJob, parse_manifest
from elasticjob_operator.rendezvous.etcd_registry import (
    UNUSED_SECONDS,
    EtcdRefused,
    EtcdRegistry,
)
from elasticjob_operator.rendezvous.etcd_source import EtcdSource
from elasticjob_operator.rendezvous.informer_cache import InformerCache
from elasticjob_operator.settings import EtcdSettings
from tests.integration.kube_helpers import elasticjob

ENDPOINT = "http://127.0.0.1:9"


class Secrets:
    """API server with one Secret."""

    def __init__(
        self, data: Mapping[str, bytes] | None = None, error: KubeError | None = None
    ) -> None:
        self.password = b"mistyped"
        self._error = error
        self._data = data

    async def get(self, *_: object) -> dict[str, Any]:
        if self._error is not None:
            raise self._error
        data = self._data or {"password": self.password}
        return {"data": {key: base64.b64encode(value).decode() for key, value in data.items()}}


def job_of(uid: str, endpoint: str = ENDPOINT) -> ElasticJob:
    raw = elasticjob("job")
    raw["metadata"]["uid"] = uid
    raw["spec"]["rendezvous"] = {"endpoints": [endpoint], "secretName": "etcd"}
    return parse_manifest(raw)


def set_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no informer cache reach its etcd."""

    async def reached(*_: object) -> bool:
        return False

    monkeypatch.setattr(InformerCache, "reached", reached)


def registry(tasks: asyncio.TaskGroup, secrets: Secrets, *allowed: str) -> EtcdRegistry:
    """Return a registry that accepts these endpoints in jobs."""
    settings = EtcdSettings((ENDPOINT,), allowed=frozenset(allowed))
    return EtcdRegistry(settings, secrets, tasks, lambda *_: None)  # type: ignore[arg-type]


def source_of(secrets: Secrets, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> EtcdSource:
    """Return the source of a job with this endpoint and Secret."""
    set_unreachable(monkeypatch)

    async def main() -> EtcdSource:
        async with asyncio.TaskGroup() as tasks:
            etcds = registry(tasks, secrets, endpoint)
            try:
                found = await etcds.of(job_of("uid", endpoint))
            finally:
                await etcds.aclose()
        assert isinstance(found, EtcdSource)
        return found

    try:
        return asyncio.run(main())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


TLS_ENDPOINT = "https://127.0.0.1:9"


@pytest.mark.parametrize(
    ("endpoint", "data", "message"),
    [
        (ENDPOINT, {"ca.crt": b"PEM"}, "the scheme must be https"),
        (TLS_ENDPOINT, {"tls.crt": b"PEM"}, "must be given together"),
        (TLS_ENDPOINT, {"tls.key": b"PEM", "tls.crt": b""}, "must be given together"),
    ],
    ids=["certificates without TLS", "no key", "empty certificate"],
)
def test_secret_that_does_not_fit_the_endpoints_is_named(
    endpoint: str, data: dict[str, bytes], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EtcdRefused, match=message) as refused:
        source_of(Secrets(data), endpoint, monkeypatch)
    assert refused.value.obstacle is Obstacle.SECRET
    assert endpoint in str(refused.value)
    assert "/tmp" not in str(refused.value)


def test_files_of_a_secret_that_does_not_fit_are_removed_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def main() -> list[Path]:
        async with asyncio.TaskGroup() as tasks:
            settings = EtcdSettings((ENDPOINT,), allowed=frozenset({ENDPOINT}))
            secrets = Secrets({"tls.crt": b"PEM", "tls.key": b"PEM"})
            etcds = EtcdRegistry(settings, secrets, tasks, lambda *_: None)  # type: ignore[arg-type]
            with pytest.raises(EtcdRefused):
                await etcds.of(job_of("uid"))
            left = list(tmp_path.iterdir())
            await etcds.aclose()
        return left

    assert asyncio.run(main()) == []


def test_secret_that_may_not_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    error = Forbidden("get secrets team/etcd", "secrets is forbidden", 403)
    with pytest.raises(EtcdRefused, match="to read Secret etcd in default") as refused:
        source_of(Secrets(error=error), ENDPOINT, monkeypatch)
    assert refused.value.obstacle is Obstacle.NOT_SERVED


@pytest.mark.parametrize(
    ("user", "password", "expected"),
    [
        (b"me\n", b"secret\n", ("me", "secret")),
        (b"me", b"\xff", ("me", "\ufffd")),
        (b"", b"", (None, "")),
    ],
    ids=["newlines", "not UTF-8", "empty"],
)
def test_credentials_are_read_as_the_agents_read_them(
    user: bytes, password: bytes, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = Secrets({"username": user, "password": password})
    token = source_of(secrets, ENDPOINT, monkeypatch).etcd.client.transport.token
    assert (token.user, token.password) == expected


def test_job_waits_for_the_etcd_that_replaced_another_during_its_first_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job that waited for the replaced one would never be woken."""
    secrets = Secrets()

    async def main() -> set[str]:
        async with asyncio.TaskGroup() as tasks:
            etcds = registry(tasks, secrets, ENDPOINT)

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


def test_etcd_that_no_job_uses_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its client stays for reconciles that still use it, its cache does not."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = "http://127.0.0.1:8"
    set_unreachable(monkeypatch)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            secrets = Secrets()
            etcds = registry(tasks, secrets, ENDPOINT, other)

            def named() -> list[str]:
                return [url for etcd in etcds.all()[1:] for url in etcd.client.endpoints]

            await etcds.of(job_of("first"))
            await etcds.of(job_of("second"))
            await etcds.release({"first", "second"}, 0.0)
            assert named() == [ENDPOINT]
            unused = etcds.all()[1]
            await etcds.of(job_of("second", other))
            await etcds.release({"second"}, 10.0)
            assert named() == [other]
            await asyncio.sleep(0)
            assert all(task.cancelled() for task in unused.tasks)
            assert len(list(tmp_path.iterdir())) == 2, "its files"
            await etcds.release({"second"}, 10.0 + UNUSED_SECONDS)
            assert len(list(tmp_path.iterdir())) == 1
            await etcds.of(job_of("first"))
            assert named() == [other, ENDPOINT]
            await etcds.aclose()

    asyncio.run(main())
    assert list(tmp_path.iterdir()) == []


def test_etcd_that_a_job_has_left_is_kept_for_its_records(monkeypatch: pytest.MonkeyPatch) -> None:
    other = "http://127.0.0.1:8"
    set_unreachable(monkeypatch)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            etcds = registry(tasks, Secrets(), ENDPOINT, other)
            await etcds.of(job_of("first"))
            left = etcds.all()[1]
            monkeypatch.setattr(left.cache, "jobs", lambda: (("team", "first"),))
            await etcds.of(job_of("first", other))
            await etcds.release({"first"}, 0.0)
            assert left in etcds.all()
            await etcds.release(set(), 10.0)  # the job is deleted, and its data with it
            assert left not in etcds.all()
            await etcds.aclose()

    asyncio.run(main())


def test_client_with_a_former_secret_is_closed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    set_unreachable(monkeypatch)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            secrets = Secrets()
            etcds = registry(tasks, secrets, ENDPOINT)
            await etcds.of(job_of("uid"))
            secrets.password = b"right"
            await etcds.of(job_of("uid"))
            for now in (0.0, UNUSED_SECONDS):
                assert len(list(tmp_path.iterdir())) == 2
                await etcds.release({"uid"}, now)
            assert len(list(tmp_path.iterdir())) == 1
            await etcds.aclose()

    asyncio.run(main())
