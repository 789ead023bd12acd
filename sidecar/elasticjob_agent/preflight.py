"""Preflight check of an agent started by hand: ends early if etcd is away or the run is closed.

In a pod the agent waits for etcd instead, and an operator chooses the incarnation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from elasticjob_agent.settings import AgentSettings
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import Ambiguous, EtcdError, Retryable
from elasticjob_rendezvous.etcd.shared_key import shared_key
from elasticjob_rendezvous.protocol.kv import Range
from elasticjob_rendezvous.protocol.records.codec import MalformedRecord, decode
from elasticjob_rendezvous.protocol.records.keys import Keys
from elasticjob_rendezvous.protocol.records.members import Round, RoundState

log = logging.getLogger("elasticjob.agent")

ATTEMPT_SECONDS = 3.0
RETRY_SECONDS = 0.2

T = TypeVar("T")


class PreflightError(Exception):
    """Obstacle to joining; the text names the cause and the fix."""


async def preflight_check(settings: AgentSettings, connect_seconds: float) -> AgentSettings:
    """Wait up to `connect_seconds` for etcd, then check that the run is open.

    Return the settings with the key that etcd keeps for this run, if it does.

    Raises:
        PreflightError: etcd does not answer or accepts no write, or the run is closed.
    """
    deadline = time.monotonic() + connect_seconds
    try:
        async with Client(
            settings.etcd.endpoints,
            tls=settings.etcd.tls,
            user=settings.etcd.user,
            password=settings.etcd.password,
            request_timeout_seconds=min(ATTEMPT_SECONDS, max(0.1, connect_seconds)),
        ) as client:
            round_ = await _persistent(settings, deadline, lambda: _read_round(client, settings))
            if round_ is not None and round_.state is RoundState.CLOSED:
                raise PreflightError(_closed(settings, round_))
            if not settings.key_in_etcd:
                return settings
            _, job_key = await _persistent(
                settings, deadline, lambda: shared_key(client, settings.prefix)
            )
            return replace(settings, job_key=job_key)
    except Ambiguous as error:
        problem = f"{_where(settings)} accepted no write within {connect_seconds:g} s"
        raise PreflightError(f"etcd at {problem}: {error}") from error
    except Retryable as error:
        problem = f"{_where(settings)} within {connect_seconds:g} s"
        raise PreflightError(f"no etcd answered at {problem}: {error}") from error
    except EtcdError as error:
        raise PreflightError(str(error)) from error


def _where(settings: AgentSettings) -> str:
    return ", ".join(settings.etcd.endpoints)


async def _persistent(
    settings: AgentSettings, deadline: float, request: Callable[[], Awaitable[T]]
) -> T:
    """Repeat a request until etcd serves it, up to the deadline."""
    logged = False
    while True:
        try:
            return await request()
        except Retryable as error:
            if time.monotonic() >= deadline:
                raise
            if not logged:
                log.warning("%s: %s; retrying", settings.name, error)
                logged = True
            await asyncio.sleep(max(RETRY_SECONDS, error.delay_seconds))


async def _read_round(client: Client, settings: AgentSettings) -> Round | None:
    key = Keys(settings.prefix).round
    found = await client.range(Range(key))
    try:
        return decode(Round, key, found.kvs[0].value) if found.kvs else None
    except MalformedRecord as error:
        raise PreflightError(str(error)) from error


def _closed(settings: AgentSettings, round_: Round) -> str:
    how = f" ({round_.outcome.kind})" if round_.outcome is not None else ""
    incarnation = int(settings.prefix.rstrip("/").rpartition("/")[2])
    return (
        f"the run {settings.run_id!r} is closed{how} and cannot continue. For a new run give "
        f"a --rdzv-id of its own, or --rdzv-conf incarnation={incarnation + 1} on every agent"
    )
