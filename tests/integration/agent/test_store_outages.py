"""Reports of an etcd that is away or refuses writes, by every agent: soon, precise, once.

Each test has one server and one gang, and goes through all faults of both.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticjob_rendezvous.protocol.store_health import SPARING_SECONDS
from tests.integration.agent_rig import TORCHS, Gang, until
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import VERSIONS, EtcdCluster, EtcdServer, Ports
from tests.integration.full_etcd import NO_SPACE, SMALL, empty, fill
from tests.integration.launcher_rig import process_tag

__all__ = ["process_tag"]

StartCluster = Callable[..., EtcdCluster]

NAMED_SECONDS = 3.0
SLOW_SECONDS = 15.0
"""Allowance for a machine busy with other tests."""
REFUSES = "refuses writes: "
AWAY = "cannot be reached: "
ACCEPTS = "accepts writes again after "
ANSWERS = "answers again after "
STUCK = "waiting: etcd refuses writes: no round can form until it accepts them"
CHEAP = "--bcrypt-cost=4"
ROOT, KEYS = "root:secret", "/elasticjob/"
CONF = "last_call_timeout=0.5,settle=0.3,confirm=2,stop_grace=3"


@pytest.fixture
def folder(process_tag: str, tmp_path: Path) -> Path:
    return tmp_path


class Outage:
    """Gang of two with its agents' output so far."""

    def __init__(
        self,
        outages: list[Outage],
        folder: Path,
        etcd: EtcdServer,
        lease: int,
        *options: str,
        conf: str = "",
    ) -> None:
        outages.append(self)
        self.etcd = etcd
        self.gang = Gang(folder, etcd)
        conf = f"{CONF},keep_alive_seconds={lease}{conf}" if lease else TORCHS
        for _ in range(2):
            self.gang.agent("2:2", *options, conf=conf)
        self.workers = self.gang.started(1, 2)
        self.read = {agent.name: 0 for agent in self.gang.agents}

    def forget(self) -> None:
        """Ignore all output up to now."""
        self.read = {agent.name: len(agent.output()) for agent in self.gang.agents}

    def said(self) -> list[str]:
        """Return the output of each agent since `forget`."""
        agents = (agent for agent in self.gang.agents if agent.name in self.read)
        return [agent.output()[self.read[agent.name] :] for agent in agents]

    def await_report(self, text: str, since: float, seconds: float = NAMED_SECONDS) -> None:
        """Wait until every agent prints that text, within `seconds` of `since`."""
        limit = since + seconds + SLOW_SECONDS - time.monotonic()
        try:
            until(lambda: all(text in said for said in self.said()), repr(text), limit)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.gang.outputs()}") from error

    def assert_reported_once(self, *texts: str) -> None:
        for text in texts:
            for said in self.said():
                lines = [line for line in said.splitlines() if text in line]
                assert len(lines) == 1, f"{text!r}: {lines}\n{said}"

    def train_on(self) -> None:
        for worker in self.workers:
            self.gang.stepping(worker)

    def end(self) -> None:
        """Finish with success."""
        self.gang.finish()
        for agent in self.gang.agents:
            assert agent.wait() == 0, self.gang.outputs()

    def close(self) -> None:
        self.gang.close()


@pytest.fixture
def outages(folder: Path) -> Iterator[list[Outage]]:
    made: list[Outage] = []
    yield made
    for outage in made:
        outage.close()


def guarded(etcd: EtcdServer) -> None:
    """Enable authentication for root, and a job's user limited to its keys."""
    etcd.ctl("user", "add", ROOT)
    etcd.ctl("user", "grant-role", "root", "root")
    etcd.ctl("role", "add", "job")
    etcd.ctl("role", "grant-permission", "--prefix", "job", "readwrite", KEYS)
    etcd.ctl("user", "add", "job:word")
    etcd.ctl("user", "grant-role", "job", "job")
    etcd.ctl("auth", "enable")


def interrupt(
    outage: Outage, away: Callable[[], None], back: Callable[[], object], why: str = ""
) -> None:
    """Check that the outage and its end are reported, while workers train on."""
    outage.forget()
    away()
    outage.await_report(AWAY, time.monotonic())
    assert all(why in said for said in outage.said()), outage.said()
    outage.train_on()
    back()
    outage.await_report(ANSWERS, time.monotonic())
    outage.assert_reported_once(AWAY, ANSWERS)
    outage.train_on()


def take_writes(outage: Outage) -> None:
    """Leave the job's user read access only."""
    etcd = outage.etcd
    outage.forget()
    etcd.ctl("role", "grant-permission", "--prefix", "job", "read", KEYS, user=ROOT)
    denied = f"{REFUSES}etcdserver: permission denied"
    outage.await_report(denied, time.monotonic())
    outage.train_on()
    etcd.ctl("role", "grant-permission", "--prefix", "job", "readwrite", KEYS, user=ROOT)
    outage.await_report(ACCEPTS, time.monotonic())
    outage.assert_reported_once(denied, ACCEPTS)


def take_user(outage: Outage) -> None:
    """Delete the job's user and make it again."""
    etcd = outage.etcd
    outage.forget()
    etcd.ctl("user", "delete", "job", user=ROOT)
    failed = f"{REFUSES}etcdserver: authentication failed"
    outage.await_report(failed, time.monotonic())
    outage.train_on()
    etcd.ctl("user", "add", "job:word", user=ROOT)
    etcd.ctl("user", "grant-role", "job", "job", user=ROOT)
    outage.await_report(ACCEPTS, time.monotonic(), SPARING_SECONDS + NAMED_SECONDS)
    outage.assert_reported_once(failed, ACCEPTS)


def run_full(outage: Outage) -> None:
    """Fail a worker with a full etcd: its node reports the wait, and continues afterwards."""
    etcd, gang = outage.etcd, outage.gang
    outage.forget()
    fill(etcd, *ROOT.split(":"))
    outage.await_report(f"etcd at 127.0.0.1:{etcd.port} {REFUSES}{NO_SPACE}", time.monotonic())
    outage.train_on()
    gang.fail(1)
    until(lambda: any(STUCK in said for said in outage.said()), repr(STUCK))
    empty(etcd, ROOT)
    outage.await_report(ACCEPTS, time.monotonic())
    outage.workers = gang.started(2, 2)
    outage.assert_reported_once(NO_SPACE, ACCEPTS)
    before = [said.partition(ACCEPTS)[0] for said in outage.said()]
    assert not any("waiting: round 1 is final" in said for said in before)


@pytest.mark.parametrize(("version", "lease"), list(zip(VERSIONS, (3, 5, 3, 5), strict=True)))
def test_unusable_etcd_is_reported_once_by_every_agent(
    folder: Path, start_etcd: StartEtcd, outages: list[Outage], version: str, lease: int
) -> None:
    etcd = start_etcd(version, arguments=[SMALL, CHEAP])
    guarded(etcd)
    outage = Outage(outages, folder, etcd, lease, conf=",user=job,password=word")
    oldest, newest = version == VERSIONS[0], version == VERSIONS[-1]
    if newest:  # detection by the client itself does not depend on the version
        interrupt(outage, etcd.pause, etcd.resume, "no answer")
        interrupt(outage, etcd.kill, etcd.start, "Connection refused")
    take_writes(outage)
    if oldest or newest:
        take_user(outage)
    run_full(outage)
    outage.end()


def test_etcd_without_leader_is_reported(
    folder: Path, start_cluster: StartCluster, outages: list[Outage]
) -> None:
    cluster = start_cluster()
    outage = Outage(outages, folder, cluster.members[0], 3)
    for member in cluster.members[1:]:
        member.kill()
    outage.await_report(f"{REFUSES}etcdserver: no leader", time.monotonic())
    outage.train_on()
    cluster.members[1].start()
    outage.await_report(ACCEPTS, time.monotonic())
    outage.end()


def test_absent_v2_api_is_reported_once_by_every_agent(
    folder: Path, start_etcd: StartEtcd, outages: list[Outage]
) -> None:
    etcd = start_etcd("3.5", arguments=["--enable-v2"])
    options = "--rdzv-backend=etcd-v2", "--local-addr=127.0.0.1"
    outage = Outage(outages, folder, etcd, 0, *options)
    interrupt(outage, etcd.kill, etcd.start)
    assert not any("does not answer" in said for said in outage.said())
    outage.end()


def test_c10d_store_of_absent_host_is_reported_once_by_every_other_agent(
    newest_etcd: EtcdServer, folder: Path, outages: list[Outage]
) -> None:
    held = Ports(1)
    host, port = "127.0.0.1", held.numbers[0]
    held.close()
    options = "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}"
    outage = Outage(outages, folder, newest_etcd, 0, *options)
    hosts = [agent for agent in outage.gang.agents if "hosts the c10d store" in agent.output()]
    outage.read = {agent.name: 0 for agent in outage.gang.agents if agent not in hosts}
    hosts[0].signal(signal.SIGSTOP)
    outage.await_report(f"the c10d store at {host}:{port} {AWAY}", time.monotonic())
    hosts[0].signal(signal.SIGCONT)
    outage.await_report(ANSWERS, time.monotonic())
    outage.assert_reported_once(AWAY, ANSWERS)
    outage.end()
