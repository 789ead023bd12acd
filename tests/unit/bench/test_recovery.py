"""Ratios and commands of the recovery benchmark; search for its processes and their end."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from bench import processes
from bench.faults import Fault, Outcome
from bench.peers.commands import WORKER, peers
from bench.plot import plot_recovery, plot_rendezvous
from bench.recovery import Measured, ratios

PEERS = peers("3.7.3", "3.4")


def test_ratios_are_by_peer_gang_fault_and_mode_and_null_without_recovery() -> None:
    def cell(peer: str, fault: Fault, *outcomes: Outcome) -> Measured:
        return Measured(PEERS[peer], 4, fault, list(outcomes))

    def took(*seconds: float) -> list[Outcome]:
        return [Outcome(each, None, each / 2, {"stop": each / 4}) for each in seconds]

    cells = [
        cell("elasticjob", Fault.DRAIN, *took(0.3, 0.2, 0.25)),
        cell("elasticjob", Fault.JOIN, *took(0.3)),
        cell("elasticjob-cold", Fault.DRAIN, *took(2.5)),
        cell("etcd", Fault.DRAIN, Outcome(40.0)),
        cell("etcd", Fault.JOIN, Outcome(None, "never")),
    ]
    table = {(each.peer.name, each.gang, each.fault): each for each in cells}
    assert ratios(table) == {
        "etcd/4/drain/warm": 160.0,
        "etcd/4/drain/cold": 16.0,
        "etcd/4/join/warm": None,
    }
    assert json.loads(json.dumps([cells[0].to_json(), cells[4].to_json()])) == [
        {
            "peer": "elasticjob",
            "gang": 4,
            "fault": "drain",
            "mode": "warm",
            "seconds": 0.25,
            "pause": 0.125,
            "split": {"stop": 0.0625},
            "error": None,
            "runs": [0.3, 0.2, 0.25],
        },
        {
            "peer": "etcd",
            "gang": 4,
            "fault": "join",
            "mode": "cold",
            "seconds": None,
            "pause": None,
            "split": {},
            "error": "never",
            "runs": [None],
        },
    ]


def test_all_peers_run_the_same_worker_with_the_same_parameters() -> None:
    for peer in PEERS.values():
        command = peer.command("127.0.0.1:2379", "run", 0)
        assert command[0] == sys.executable
        assert command[-1] == str(WORKER)
        assert {"--nnodes=1:64", "--nproc-per-node=1", "--rdzv-id=run"} <= set(command)


def test_own_peers_differ_only_in_worker_start() -> None:
    ours = {name: peer for name, peer in PEERS.items() if peer.ours}
    assert {name: peer.mode for name, peer in ours.items()} == {
        "elasticjob": "warm",
        "elasticjob-cold": "cold",
    }
    warm, cold = (peer.command("127.0.0.1:2379", "run", 0) for peer in ours.values())
    assert [part for part in cold if part not in warm] == ["--warm-start=never"]


def test_etcd_and_c10d_run_at_defaults_except_store_host() -> None:
    def conf(peer: str, member: int) -> list[str]:
        command = PEERS[peer].command("127.0.0.1:2379", "run", member)
        return [part for part in command if part.startswith("--rdzv-conf")]

    assert conf("etcd", 0) == conf("elasticjob", 0) == []
    assert conf("etcd-tuned", 3) == ["--rdzv-conf=last_call_timeout=1"]
    assert [conf("c10d", member) for member in (0, 1)] == [
        ["--rdzv-conf=is_host=true"],
        ["--rdzv-conf=is_host=false"],
    ]
    assert PEERS["c10d"].environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"


def test_environment_tag_finds_grandchild_in_its_own_session() -> None:
    sleeper = "import time; print('up', flush=True); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleeper!r}], \
start_new_session=True)"
    with subprocess.Popen(
        [sys.executable, "-c", parent],
        env={"BENCH_TEST_MARK": "one"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        assert processes.marked("BENCH_TEST_MARK", "on") == []
        found = processes.marked("BENCH_TEST_MARK", "one")
        assert len(found) == 2
        assert process.pid in found
        for pid in found:
            processes.kill(pid)
        deadline = time.monotonic() + 60
        while any(processes.alive(pid) for pid in found):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_plots_are_drawn_with_failures_among_the_rows(tmp_path: Path) -> None:
    rendezvous = [
        {"backend": b, "members": n, "wall_seconds": w, "requests_per_member": r}
        for b, n, w, r in [
            ("elasticjob", 8, 0.1, 6.0),
            ("etcd", 8, 1.2, 40.0),
            ("c10d", 8, None, None),
        ]
    ]
    recovery = [
        {"peer": peer, "gang": gang, "fault": "join", "seconds": seconds}
        for peer, gang, seconds in [
            ("elasticjob", 4, 2.0),
            ("etcd", 4, None),
            ("elasticjob", 16, 2.5),
        ]
    ]
    plot_rendezvous(rendezvous, tmp_path / "rendezvous.png")
    plot_recovery(recovery, 120, tmp_path / "recovery.png")
    for name in ("rendezvous.png", "recovery.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
