"""Pinned plans of real partitions: `python -m tests.partitions` draws any number of them.

Each pinned plan is a gang of two or three nodes in network namespaces, with a real etcd.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.etcd_server import wait_until
from tests.integration.launcher_rig import launcher_file
from tests.partitions.journal import Journal, overlaps
from tests.partitions.network import Network, sweep
from tests.partitions.plan import KINDS, Fault, Mode, Plan, Role, Scope, Way, draw
from tests.partitions.run import execute
from tests.paths import ROOT

__all__ = ["launcher_file"]

_SHORT = Plan(0, lease_seconds=2.0, cut_after=0.5)
CUT_OFF = [
    # Without the launcher's deadline its workers live for 30 s, the next round begins after 4 s.
    replace(_SHORT, seed=1, fault=Fault.KILL, nodes=2),
    replace(_SHORT, seed=2, fault=Fault.STOP, fault_at=0.3, role=Role.RANK_0),
    replace(_SHORT, seed=3, fault=Fault.KILL, scope=Scope.PEERS, way=Way.RECEIVED, nodes=2),
    # As found: the agent receives nothing, but etcd still receives from it until it hangs.
    replace(
        _SHORT,
        seed=4,
        mode=Mode.BARE,
        lease_seconds=5.0,
        role=Role.RANK_0,
        way=Way.RECEIVED,
        fault=Fault.STOP_KILL,
        fault_at=3.74,
        fate_at=8.0,
        restart_after=0.5,
        heal_at=9.0,
    ),
    replace(
        _SHORT,
        seed=5,
        mode=Mode.BARE,
        scope=Scope.ETCD,
        fault=Fault.STOP_RESUME,
        fault_at=0.5,
        fate_at=5.0,
        heal_at=6.0,
    ),
]


def _log(folder: Path, name: str, *seconds: float) -> None:
    number, rank, node, _ = name.split("-")
    lines = (f"{int(second * 1e9)} {number} {rank} {node}\n" for second in seconds)
    (folder / name).write_text("".join(lines) + "73")  # killed while it wrote


@pytest.mark.parametrize(
    ("rank", "last", "found"),
    [(0, 2.0, []), (0, 3.2, [(True, 0.1)]), (1, 3.2, [(False, 0.1)]), (0, 3.1, [(True, 0.0)])],
)
def test_write_beside_later_round_is_found_in_logs(
    tmp_path: Path, rank: int, last: float, found: list[tuple[bool, float]]
) -> None:
    _log(tmp_path, f"9-{rank}-n0-100", 1.0, 1.5, last)
    _log(tmp_path, "9-2-n2-101", 1.0, 2.9)
    _log(tmp_path, "10-0-n1-102", 3.1, 4.0)
    pairs = overlaps(Journal(tmp_path).writers())
    assert [(pair.both_rank_0, round(pair.seconds, 3)) for pair in pairs] == found
    assert all((pair.older.pid, pair.newer.pid) == (100, 102) for pair in pairs)


def test_seeds_cycle_through_all_kinds_of_runs() -> None:
    plans = [draw(seed) for seed in range(7, 7 + len(KINDS))]
    kinds = {(plan.scope, plan.way, plan.fault, plan.heal_at is not None) for plan in plans}
    assert kinds == set(KINDS)
    assert plans == [draw(plan.seed) for plan in plans]
    assert {plan.mode for plan in plans} == set(Mode)
    assert {plan.lease_seconds for plan in plans} == {2.0, 3.0, 5.0}


_RECEIVE = """
import socket, sys
with socket.socket(type=socket.SOCK_DGRAM) as own:
    own.settimeout(20)
    own.bind((sys.argv[1], 7000))
    print("bound", flush=True)
    while True:
        print(own.recv(99).decode(), flush=True)
"""
_SEND = """
import socket, sys
with socket.socket(type=socket.SOCK_DGRAM) as own:
    own.sendto(sys.argv[2].encode(), (sys.argv[1], 7000))
"""


class Receiver:
    """Process on a host that prints each packet."""

    def __init__(self, network: Network, host: str) -> None:
        self._network = network
        self._address = network.address(host)
        self.process = subprocess.Popen(
            network.command(host, sys.executable, "-c", _RECEIVE, self._address),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.reads() == "bound"

    def reads(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, host: str, text: str) -> None:
        command = (sys.executable, "-c", _SEND, self._address, text)
        subprocess.run(self._network.command(host, *command), check=True)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_cut_drops_packets_in_one_direction_until_healed() -> None:
    with Network("cuts", ("a", "b", "c")).up() as network, ExitStack() as stack:
        receivers = {}
        for host in ("a", "b"):
            receivers[host] = Receiver(network, host)
            stack.callback(receivers[host].close)
        network.cut([("a", "b")])
        receivers["b"].send("a", "lost")
        receivers["b"].send("c", "from c")
        receivers["a"].send("b", "from b")
        assert receivers["b"].reads() == "from c"
        assert receivers["a"].reads() == "from b"
        network.heal()
        receivers["b"].send("a", "after the heal")
        assert receivers["b"].reads() == "after the heal"


def _namespaces(pid: int) -> list[str]:
    return [path.name for path in Path("/run/netns").glob(f"ejpart-{pid}-*")]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_runner_leaves_no_process_and_no_network(
    end: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.partitions", "--only", "2", f"--folder={tmp_path}"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as runner:
        try:
            wait_until(lambda: bool(list(tmp_path.glob("seed-2/n1-*.log"))), "the nodes")
            runner.send_signal(end)
            _, errors = runner.communicate(timeout=30)
        finally:
            runner.kill()
    left = _namespaces(runner.pid)
    if end is signal.SIGKILL:  # it could not clean up: the next runner does
        assert left
        sweep()
        left = _namespaces(runner.pid)
    else:
        assert (runner.returncode, errors) == (130, "1 runs were not made\n")
    assert not left
    marked = f"{tmp_path}".encode()

    def running() -> list[Path]:
        return [path for path in Path("/proc").glob("[0-9]*/cmdline") if marked in _content(path)]

    wait_until(lambda: not running(), "the end of the killed processes")


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it ended
        return b""


def test_no_worker_writes_after_worker_of_later_round_started(
    tmp_path: Path, launcher_file: Path
) -> None:
    """The plans run at once, because they mostly wait."""
    stop = threading.Event()
    with ThreadPoolExecutor(len(CUT_OFF)) as pool:
        try:
            running = [
                pool.submit(execute, plan, tmp_path, launcher_file, stop) for plan in CUT_OFF
            ]
            outcomes = [one.result() for one in running]
        finally:
            stop.set()
    found = [outcome.text() for outcome in outcomes if outcome.findings]
    assert not found, "\n".join(found)
