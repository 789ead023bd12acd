"""A hostile etcd user that writes as fast as it can, beside ten honest jobs."""

from __future__ import annotations

import asyncio
import base64
import itertools
import multiprocessing
import os
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import EtcdError
from elasticjob_rendezvous.protocol.kv import Put, Txn
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.keys import Keys, job_prefix
from elasticjob_rendezvous.protocol.records.members import (
    Cause,
    CauseKind,
    Member,
    Round,
    RoundState,
)
from tests.integration.apiserver import ApiServer
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import EtcdServer
from tests.integration.operator_rig import (
    ROOT_PASSWORD,
    Namespace,
    Operator,
    administers_users,
)

MEMORY_LIMIT = 1 << 30
"""Memory limit of the operator in the chart's values."""
HONEST = [f"good{number}" for number in range(10)]
MOST_STORED = 256 << 20
"""Size of etcd's database after all attacks; its quota in the chart's values is 2 GiB."""
LAG_SECONDS = 10.0  # of one second, on a busy machine
PHASE_SECONDS = 3.0
REFUSAL_SECONDS = 60.0
KIB = 1024


@pytest.fixture
def etcd(start_etcd: StartEtcd) -> EtcdServer:
    return start_etcd("3.6", arguments=("--bcrypt-cost=4",))


@pytest.fixture
def operator(
    tmp_path: Path, api_server: ApiServer, etcd: EtcdServer, namespace: str
) -> Iterator[Operator]:
    options = administers_users(tmp_path, namespace)
    with Operator(tmp_path, api_server, etcd, options=options).running() as replica:
        yield replica


def memory(operator: Operator, name: str) -> int:
    """Return a figure of the operator's memory in bytes: VmSize, VmRSS or VmHWM."""
    assert operator.process is not None
    for line in Path(f"/proc/{operator.process.pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * KIB
    raise AssertionError(f"{name} is missing")


def limit_memory(operator: Operator) -> None:
    """Let the operator's address space grow as far as its memory may; part of it is only mapped."""
    assert operator.process is not None
    most = memory(operator, "VmSize") + MEMORY_LIMIT - memory(operator, "VmRSS")
    resource.prlimit(operator.process.pid, resource.RLIMIT_AS, (most, most))


def login(ns: Namespace, job: str) -> tuple[str, str]:
    data = ns.present("secrets", f"{job}-elasticjob")["data"]
    return base64.b64decode(data["user"]).decode(), base64.b64decode(data["password"]).decode()


Attack = Callable[[Client, Keys], Awaitable[None]]


async def rewrite_one_key(client: Client, keys: Keys) -> None:
    """Write training progress of one member, and large values in its place."""
    for step in itertools.count():
        record = encode(Member("m", "s", "bad-0", "10.0.0.1", 1, step=step))
        junk = b'{"step":1,"junk":"' + b"x" * (KIB * KIB) + b'"}'
        await client.txn(Txn((), (Put(keys.session("m", "s"), junk if step % 10 else record),)))


async def write_members(client: Client, keys: Keys) -> None:
    """Write members with names of absent pods, fewer and slower than the quota allows."""
    for count in itertools.count():
        await asyncio.sleep(0.05)
        first = count % 9 * 100
        puts = [
            Put(keys.session(f"m{at}", "s"), encode(Member(f"m{at}", "s", f"bad-{at}", "x", 1)))
            for at in range(first, first + 100)
        ]
        await client.txn(Txn((), tuple(puts)))


async def write_small_keys(client: Client, keys: Keys) -> None:
    for first in itertools.count(0, 100):
        puts = (Put(f"{keys.prefix}junk/{first + at}", b"x") for at in range(100))
        await client.txn(Txn((), tuple(puts)))


async def write_big_values(client: Client, keys: Keys) -> None:
    for at in itertools.count():
        await client.txn(Txn((), (Put(f"{keys.prefix}junk/{at}", b"x" * 1400 * KIB),)))


async def attack(url: str, keys: Keys, user: tuple[str, str], how: Attack, seconds: float) -> bool:
    """Run an attack until etcd refuses a write, and return True; return False after the time."""
    async with Client([url], user=user[0], password=user[1]) as client:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                try:
                    await how(client, keys)
                except EtcdError:
                    return True
    return False


def run_attack(url: str, keys: Keys, user: tuple[str, str], how: Attack, seconds: float) -> bool:
    return asyncio.run(attack(url, keys, user, how, seconds))


@dataclass
class HonestJobs:
    """Rounds of the honest jobs, and the time until each is in the job's status."""

    ns: Namespace
    client: Client
    keys: dict[str, Keys]
    waiting: dict[str, tuple[int, float]] = field(default_factory=dict)
    lags: list[float] = field(default_factory=list)

    async def run(self) -> None:
        """Open a round of one job after the other."""
        for number in itertools.count(1):
            for name in HONEST:
                self.collect()
                if name not in self.waiting:
                    self.waiting[name] = number, time.monotonic()
                    opened = Round(number, RoundState.JOINABLE, Cause(CauseKind.START))
                    await self.client.txn(Txn((), (Put(self.keys[name].round, encode(opened)),)))
                await asyncio.to_thread(self.look)
                await asyncio.sleep(0.1)

    def look(self) -> None:
        now = time.monotonic()
        for raw in self.ns.all("elasticjobs"):
            name = raw["metadata"]["name"]
            shown = ((raw.get("status") or {}).get("rendezvous") or {}).get("round", 0)
            if name in self.waiting and shown >= self.waiting[name][0]:
                self.lags.append(now - self.waiting.pop(name)[1])

    def collect(self) -> None:
        """Fail as soon as a status is late."""
        for name, (number, since) in self.waiting.items():
            late = time.monotonic() - since
            assert late < LAG_SECONDS, (
                f"round {number} of {name} not in its status for {late:.1f} s"
            )


@asynccontextmanager
async def honest_jobs(ns: Namespace, etcd: EtcdServer) -> AsyncIterator[HonestJobs]:
    async with Client([etcd.url], user="root", password=ROOT_PASSWORD) as client:
        keys = {name: keys_of(ns, name) for name in HONEST}
        jobs = HonestJobs(ns, client, keys)
        task = asyncio.create_task(jobs.run())
        try:
            yield jobs
            if task.done():
                task.result()
        finally:
            task.cancel()
            await asyncio.wait([task])


def keys_of(ns: Namespace, job: str) -> Keys:
    return Keys(job_prefix(ns.name, ns.job(job)["metadata"]["uid"], 1))


def test_hostile_writers_neither_delay_honest_jobs_nor_exhaust_the_operator(
    operator: Operator,
    api_server: ApiServer,
    etcd: EtcdServer,
    namespace: str,
    record_property: Callable[[str, object], None],
) -> None:
    ns = Namespace(api_server, namespace)
    bad = ["bad", "worse", "worst"]
    for name in (*HONEST, *bad):
        ns.create_job(name, maxNodes=1)
    ns.await_pods(*(f"{name}-0" for name in (*HONEST, *bad)))
    limit_memory(operator)
    users = {name: (keys_of(ns, name), login(ns, name)) for name in bad}

    async def scenario(pool: ProcessPoolExecutor) -> None:
        async def refused(job: str, how: Attack, seconds: float = REFUSAL_SECONDS) -> bool:
            loop = asyncio.get_running_loop()
            attacked = (etcd.url, *users[job], how, seconds)
            return await loop.run_in_executor(pool, run_attack, *attacked)

        async with honest_jobs(ns, etcd) as jobs:
            assert not await refused("bad", write_members, PHASE_SECONDS), (
                "it stays within its quota"
            )
            assert await refused("bad", write_small_keys), "its user is revoked"
            assert await refused("worse", write_big_values), "its user is revoked"
            assert await refused("worst", rewrite_one_key), "its user is revoked"
        assert len(jobs.lags) > 2 * len(HONEST)
        record_property("lag_seconds", round(max(jobs.lags), 2))
        print(f"status of honest jobs: at most {max(jobs.lags):.2f} s late")

    # The writer is another process, on a machine of its own in a cluster: the operator goes first.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=os.nice, initargs=(10,)) as pool:
        asyncio.run(scenario(pool))
    for name in bad:
        ns.await_condition("Stalled", "TooManyRecords", name)
    stored = etcd.metric("etcd_mvcc_db_total_size_in_bytes")
    record_property("database_mib", int(stored) >> 20)
    print(f"etcd: {int(stored) >> 20} MiB")
    assert stored < MOST_STORED
    peak = memory(operator, "VmHWM")
    record_property("peak_mib", peak >> 20)
    print(f"operator: at most {peak >> 20} MiB")
    assert peak < MEMORY_LIMIT
    assert operator.ready()
