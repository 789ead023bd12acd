"""Replicas that compete for the Lease on a real API server, each a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from elasticjob_operator.replica.leader import EXIT_OVERDUE
from tests.integration.apiserver import ApiServer
from tests.integration.etcd_server import wait_until

DURATION_SECONDS = 2
PROGRAM = """
import asyncio, logging, signal, sys, time
from pathlib import Path
from elasticjob_operator.replica.lease import LeaseSettings
from elasticjob_operator.kubernetes.client import Kube
from elasticjob_operator.replica.leader import LeaseLost, hold_lease

kubeconfig, namespace, name, journal, duration = sys.argv[1:]
said = Path(journal).open("a", buffering=1)

def say(word):
    said.write(f"{time.monotonic():.6f} {name} {word}\\n")

async def main():
    task = asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    settings = LeaseSettings(namespace, "replicas", name, int(duration), int(duration) / 8)
    async with Kube.connect(Path(kubeconfig)) as kube:
        say("standing-by")
        async with hold_lease(kube, settings):
            try:
                while True:
                    say("active")
                    await asyncio.sleep(0.02)
            finally:
                say("ended")

logging.basicConfig(level=logging.INFO)
try:
    asyncio.run(main())
except asyncio.CancelledError:
    sys.exit(0)
except LeaseLost:
    sys.exit(3)
"""


@dataclass
class Replica:
    name: str
    process: subprocess.Popen[bytes]

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


class Replicas:
    """Processes and their statements, timed by one machine's monotonic clock."""

    def __init__(self, server: ApiServer, namespace: str, folder: Path, stack: ExitStack) -> None:
        self._arguments = [str(server.kubeconfig()), namespace]
        self._journal = folder / "journal"
        self._folder = folder
        self._stack = stack
        self._journal.touch()

    def start(self, name: str, duration_seconds: int = DURATION_SECONDS) -> Replica:
        words = [*self._arguments, name, str(self._journal), str(duration_seconds)]
        log = self._stack.enter_context((self._folder / f"{name}.log").open("wb"))
        process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", sys.executable, "-c", PROGRAM, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        self._stack.callback(process.wait, 10)
        self._stack.callback(process.kill)
        replica = Replica(name, process)
        wait_until(lambda: self.times(name, "standing-by") != [], f"{name} to begin")
        return replica

    def said(self) -> list[tuple[float, str, str]]:
        lines = self._journal.read_text().splitlines()
        words = [line.split() for line in lines if line.count(" ") == 2]
        return [(float(time), name, word) for time, name, word in words]

    def times(self, name: str, word: str = "active") -> list[float]:
        return [time for time, who, what in self.said() if (who, what) == (name, word)]

    def wait_active(self, name: str, after: float = 0.0) -> float:
        """Return the time at which it was first active after `after`."""

        def found() -> list[float]:
            return [time for time in self.times(name) if time > after]

        wait_until(lambda: found() != [], f"{name} to be active")
        return found()[0]

    def terms(self) -> list[str]:
        """Return the sequence of active replicas; two at once show as one that repeats."""
        names = [name for _, name, word in sorted(self.said()) if word == "active"]
        return [name for index, name in enumerate(names) if index == 0 or names[index - 1] != name]


@pytest.fixture
def replicas(api_server: ApiServer, namespace: str, tmp_path: Path) -> Iterator[Replicas]:
    with ExitStack() as stack:
        yield Replicas(api_server, namespace, tmp_path, stack)


def ended(replica: Replica) -> Callable[[], bool]:
    return lambda: replica.process.poll() is not None


def test_killed_replica_is_replaced_after_lease_expiry(
    replicas: Replicas,
) -> None:
    first = replicas.start("a")
    replicas.wait_active("a")
    replicas.start("b")
    replicas.start("c")
    first.signal(signal.SIGKILL)
    first.process.wait(60)
    last = replicas.times("a")[-1]
    wait_until(lambda: len(replicas.terms()) > 1, "another to be active")
    successor = replicas.terms()[1]
    waited = replicas.wait_active(successor) - last
    # The dead one's last renewal was a quarter of a second old, or more on a busy machine.
    assert DURATION_SECONDS * 0.5 <= waited <= DURATION_SECONDS * 10
    assert len(replicas.terms()) == 2


def test_terminated_replica_is_replaced_at_once(replicas: Replicas) -> None:
    first = replicas.start("a", duration_seconds=60)
    replicas.wait_active("a")
    replicas.start("b")
    first.signal(signal.SIGTERM)
    assert first.process.wait(60) == 0
    last = replicas.times("a", "ended")[0]
    assert 0 < replicas.wait_active("b") - last < 30, "half of the lease"
    assert replicas.terms() == ["a", "b"]


def test_suspended_replica_finds_itself_replaced(replicas: Replicas) -> None:
    first = replicas.start("a")
    replicas.wait_active("a")
    replicas.start("b")
    first.signal(signal.SIGSTOP)
    began = replicas.wait_active("b")
    first.signal(signal.SIGCONT)
    wait_until(ended(first), "the first to end")
    assert first.process.returncode in (3, EXIT_OVERDUE)
    # It continues for a turn of its loop or two, before it checks the clock.
    assert len([time for time in replicas.times("a") if time > began]) <= 2


def test_replica_without_api_server_ends_before_replacement_can_start(
    api_server: ApiServer, replicas: Replicas
) -> None:
    first = replicas.start("a")
    replicas.wait_active("a")
    replicas.start("b")
    api_server.pause()
    try:
        wait_until(ended(first), "the first to end")
    finally:
        api_server.resume()
    assert first.process.returncode == 3
    assert replicas.wait_active("b") > replicas.times("a", "ended")[0]
    assert replicas.terms() == ["a", "b"]


def test_lease_names_active_replica(
    api_server: ApiServer, namespace: str, replicas: Replicas
) -> None:
    replicas.start("a")
    replicas.wait_active("a")
    path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/replicas"
    spec = api_server.request("GET", path)["spec"]
    assert spec["holderIdentity"].startswith("a_")
    assert (spec["leaseDurationSeconds"], spec["leaseTransitions"]) == (DURATION_SECONDS, 0)
