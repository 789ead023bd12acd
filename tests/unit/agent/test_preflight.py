"""Preflight check of an agent started by hand, with an etcd that refuses requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, Self

import pytest

from elasticjob_agent import preflight
from elasticjob_agent.preflight import PreflightError, preflight_check
from elasticjob_agent.settings import AgentSettings, LogSettings
from elasticjob_rendezvous.etcd.errors import Ambiguous, EtcdError, Unauthenticated, Unavailable
from elasticjob_rendezvous.protocol.kv import Range, RangeResult, Txn, TxnResult
from tests.unit.agent.builders import agent_settings

NO_SPACE = Ambiguous("txn", "http://etcd:2379", "etcdserver: mvcc: database space exceeded")
AWAY = Unavailable("range", "http://etcd:2379", "connection refused")
DENIED = Unauthenticated("range", "http://etcd:2379", "authentication failed")


class FakeClient:
    """Client whose requests fail with these errors first."""

    def __init__(self, reads: list[EtcdError], writes: list[EtcdError]) -> None:
        self.reads, self.writes = reads, writes

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def range(self, target: Range) -> RangeResult:
        if self.reads:
            raise self.reads.pop(0)
        return RangeResult(1, 1, ())

    async def txn(self, txn: Txn) -> TxnResult:
        if self.writes:
            raise self.writes.pop(0)
        return TxnResult(True, 2, 1, ())


def check(
    monkeypatch: pytest.MonkeyPatch,
    connect_seconds: float,
    reads: list[EtcdError] | None = None,
    writes: list[EtcdError] | None = None,
) -> AgentSettings:
    client = FakeClient(reads or [], writes or [])

    def connected(*_: Any, **__: Any) -> FakeClient:
        return client

    monkeypatch.setattr(preflight, "Client", connected)
    monkeypatch.setattr(preflight, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(Unavailable, "delay_seconds", 0.0)
    settings = replace(agent_settings(LogSettings(None)), key_in_etcd=True)
    return asyncio.run(preflight_check(settings, connect_seconds))


def test_key_of_a_run_is_requested_until_etcd_accepts_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The round could be read: a new leader, or a quota that was just spent, refuses writes."""
    found = check(monkeypatch, 600.0, [AWAY], [NO_SPACE, AWAY, NO_SPACE])
    assert len(found.job_key) == 32


@pytest.mark.parametrize(
    ("reads", "writes", "text"),
    [
        ([AWAY], [], "no etcd answered at 127.0.0.1:1 within 0 s: "),
        ([], [NO_SPACE], "etcd at 127.0.0.1:1 accepted no write within 0 s: "),
        ([DENIED], [], "authentication failed"),
    ],
)
def test_error_names_the_requests_that_etcd_did_not_serve(
    monkeypatch: pytest.MonkeyPatch, reads: list[EtcdError], writes: list[EtcdError], text: str
) -> None:
    with pytest.raises(PreflightError, match=text):
        check(monkeypatch, 0.0, list(reads), list(writes))
