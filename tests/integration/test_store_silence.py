"""Reports of an etcd that is away or refuses writes, by every agent: soon, precise, once.

Each test has one server and one gang, and goes through all faults of both.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticjob_rendezvous.core.store_health import SPARING_SECONDS
from tests.integration.agent_rig import TORCHS, Gang, until
from tests.integration.conftest import StartEtcd
from tests.integration.etcd_server import VERSIONS, EtcdCluster, EtcdServer, Ports
from tests.integration.launcher_rig import process_tag
from tests.integration.store_trouble_rig import NO_SPACE, SMALL, empty, fill

__all__ = ["process_tag"]

StartCluster = Callable[..., EtcdCluster]

NAMED_SECONDS = 3.0
SLOW_SECONDS = 3.0
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


class Silence:
    """Gang of two with its agents' output so far."""

    def __init__(
        self,
        silences: list[Silence],
        folder: Path,
        etcd: EtcdServer,
        lease: int,
        *options: str,
        conf: str = "",
    ) -> None:
        silences.append(self)
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

    def all_say(self, text: str, since: float, seconds: float = NAMED_SECONDS) -> None:
        """Wait until every agent prints that text, within `seconds` of `since`."""
        limit = since + seconds + SLOW_SECONDS - time.monotonic()
        try:
            until(lambda: all(text in said for said in self.said()), repr(text), limit)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.gang.outputs()}") from error

    def said_once(self, *texts: str) -> None:
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
def silences(folder: Path) -> Iterator[list[Silence]]:
    made: list[Silence] = []
    yield made
    for silence in made:
        silence.close()


def guarded(etcd: EtcdServer) -> None:
    """Enable authentication for root, and a job's user limited to its keys."""
    etcd.ctl("user", "add", ROOT)
    etcd.ctl("user", "grant-role", "root", "root")
    etcd.ctl("role", "add", "job")
    etcd.ctl("role", "grant-permission", "--prefix", "job", "readwrite", KEYS)
    etcd.ctl("user", "add", "job:word")
    etcd.ctl("user", "grant-role", "job", "job")
    etcd.ctl("auth", "enable")


def go_away(
    silence: Silence, away: Callable[[], None], back: Callable[[], object], why: str = ""
) -> None:
    """Check that the outage and its end are reported, while workers train on."""
    silence.forget()
    away()
    silence.all_say(AWAY, time.monotonic())
    assert all(why in said for said in silence.said()), silence.said()
    silence.train_on()
    back()
    silence.all_say(ANSWERS, time.monotonic())
    silence.said_once(AWAY, ANSWERS)
    silence.train_on()


def take_writes(silence: Silence) -> None:
    """Leave the job's user read access only."""
    etcd = silence.etcd
    silence.forget()
    etcd.ctl("role", "grant-permission", "--prefix", "job", "read", KEYS, user=ROOT)
    denied = f"{REFUSES}etcdserver: permission denied"
    silence.all_say(denied, time.monotonic())
    silence.train_on()
    etcd.ctl("role", "grant-permission", "--prefix", "job", "readwrite", KEYS, user=ROOT)
    silence.all_say(ACCEPTS, time.monotonic())
    silence.said_once(denied, ACCEPTS)


def take_user(silence: Silence) -> None:
    """Delete the job's user and make it again."""
    etcd = silence.etcd
    silence.forget()
    etcd.ctl("user", "delete", "job", user=ROOT)
    failed = f"{REFUSES}etcdserver: authentication failed"
    silence.all_say(failed, time.monotonic())
    silence.train_on()
    etcd.ctl("user", "add", "job:word", user=ROOT)
    etcd.ctl("user", "grant-role", "job", "job", user=ROOT)
    silence.all_say(ACCEPTS, time.monotonic(), SPARING_SECONDS + NAMED_SECONDS)
    silence.said_once(failed, ACCEPTS)


def run_full(silence: Silence) -> None:
    """Fail a worker with a full etcd: its node reports the wait, and continues afterwards."""
    etcd, gang = silence.etcd, silence.gang
    silence.forget()
    fill(etcd, *ROOT.split(":"))
    silence.all_say(f"etcd at 127.0.0.1:{etcd.port} {REFUSES}{NO_SPACE}", time.monotonic())
    silence.train_on()
    gang.fail(1)
    until(lambda: any(STUCK in said for said in silence.said()), repr(STUCK))
    empty(etcd, ROOT)
    silence.all_say(ACCEPTS, time.monotonic())
    silence.workers = gang.started(2, 2)
    silence.said_once(NO_SPACE, ACCEPTS)
    before = [said.partition(ACCEPTS)[0] for said in silence.said()]
    assert not any("waiting: round 1 is final" in said for said in before)


@pytest.mark.parametrize(("version", "lease"), list(zip(VERSIONS, (3, 5, 3, 5), strict=True)))
def test_unusable_etcd_is_reported_once_by_every_agent(
    folder: Path, start_etcd: StartEtcd, silences: list[Silence], version: str, lease: int
) -> None:
    etcd = start_etcd(version, arguments=[SMALL, CHEAP])
    guarded(etcd)
    silence = Silence(silences, folder, etcd, lease, conf=",user=job,password=word")
    oldest, newest = version == VERSIONS[0], version == VERSIONS[-1]
    if newest:  # detection by the client itself does not depend on the version
        go_away(silence, etcd.pause, etcd.resume, "no answer")
        go_away(silence, etcd.kill, etcd.start, "Connection refused")
    take_writes(silence)
    if oldest or newest:
        take_user(silence)
    run_full(silence)
    silence.end()


def test_etcd_without_leader_is_reported(
    folder: Path, start_cluster: StartCluster, silences: list[Silence]
) -> None:
    cluster = start_cluster()
    silence = Silence(silences, folder, cluster.members[0], 3)
    for member in cluster.members[1:]:
        member.kill()
    silence.all_say(f"{REFUSES}etcdserver: no leader", time.monotonic())
    silence.train_on()
    cluster.members[1].start()
    silence.all_say(ACCEPTS, time.monotonic())
    silence.end()


def test_absent_v2_api_is_reported_once_by_every_agent(
    folder: Path, start_etcd: StartEtcd, silences: list[Silence]
) -> None:
    etcd = start_etcd("3.5", arguments=["--enable-v2"])
    options = "--rdzv-backend=etcd-v2", "--local-addr=127.0.0.1"
    silence = Silence(silences, folder, etcd, 0, *options)
    go_away(silence, etcd.kill, etcd.start)
    assert not any("does not answer" in said for said in silence.said())
    silence.end()


def test_c10d_store_of_absent_host_is_reported_once_by_every_other_agent(
    newest_etcd: EtcdServer, folder: Path, silences: list[Silence]
) -> None:
    held = Ports(1)
    host, port = "127.0.0.1", held.numbers[0]
    held.close()
    options = "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{port}"
    silence = Silence(silences, folder, newest_etcd, 0, *options)
    hosts = [agent for agent in silence.gang.agents if "hosts the c10d store" in agent.output()]
    silence.read = {agent.name: 0 for agent in silence.gang.agents if agent not in hosts}
    hosts[0].signal(signal.SIGSTOP)
    silence.all_say(f"the c10d store at {host}:{port} {AWAY}", time.monotonic())
    hosts[0].signal(signal.SIGCONT)
    silence.all_say(ANSWERS, time.monotonic())
    silence.said_once(AWAY, ANSWERS)
    silence.end()
