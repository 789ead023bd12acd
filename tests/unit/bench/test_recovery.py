"""The recovery benchmark's ratios and commands; and that its processes are found and end."""

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


def test_ratios_are_by_peer_fault_and_mode_and_null_where_a_peer_never_recovered() -> None:
    def cell(peer: str, fault: Fault, *seconds: float | None) -> Measured:
        return Measured(peer, fault, [Outcome(s, None if s else "never") for s in seconds])

    table = {
        ("elasticjob", Fault.DRAIN): cell("elasticjob", Fault.DRAIN, 3.0, 2.0, 2.5),
        ("elasticjob", Fault.JOIN): cell("elasticjob", Fault.JOIN, 3.0, 2.0, 4.0),
        ("etcd", Fault.DRAIN): cell("etcd", Fault.DRAIN, 40.0),
        ("etcd", Fault.JOIN): cell("etcd", Fault.JOIN, None),
    }
    assert ratios(table) == {"etcd/drain/cold": 16.0, "etcd/join/cold": None}
    assert json.loads(json.dumps(table["etcd", Fault.JOIN].to_json())) == {
        "peer": "etcd",
        "fault": "join",
        "mode": "cold",
        "seconds": None,
        "error": "never",
        "runs": [None],
    }


def test_all_peers_run_the_same_worker_with_the_same_bounds() -> None:
    for peer in PEERS.values():
        command = peer.command("127.0.0.1:2379", "run", 0)
        assert command[0] == sys.executable
        assert command[-1] == str(WORKER)
        assert {"--nnodes=1:8", "--nproc-per-node=1", "--rdzv-id=run"} <= set(command)


def test_etcd_and_c10d_run_at_their_defaults_but_for_who_hosts_the_store() -> None:
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


def test_a_mark_finds_a_grandchild_in_a_session_of_its_own() -> None:
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
        deadline = time.monotonic() + 10
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
        {"peer": peer, "fault": "join", "seconds": seconds}
        for peer, seconds in [("elasticjob", 2.0), ("etcd", None)]
    ]
    plot_rendezvous(rendezvous, tmp_path / "rendezvous.png")
    plot_recovery(recovery, 120, tmp_path / "recovery.png")
    for name in ("rendezvous.png", "recovery.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
