"""Errors around a gang: scripts that cannot run, a wrong etcd, full disks, Ctrl-C."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.agent_rig import (
    PATIENCE_SECONDS,
    PYTHONPATH,
    QUICK,
    AgentProcess,
    Gang,
    gang,
    until,
)
from tests.integration.etcd_server import EtcdServer
from tests.integration.launcher_rig import alive, process_tag

__all__ = ["gang", "process_tag"]


@pytest.fixture
def garbage() -> Iterator[int]:
    """Yield a port with a server that is not etcd."""

    def answer(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.recv(1024)
                    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,), daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)


def test_absent_etcd_is_reported(gang: Gang) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        agent = gang.agent("1:1", f"--rdzv-endpoint=127.0.0.1:{port}", conf="connect_timeout=1")
        assert agent.wait() == 3
    assert f"no etcd answered at 127.0.0.1:{port} within 1 s" in agent.output()
    assert "Traceback" not in agent.output()


def test_server_that_is_not_etcd_is_reported(gang: Gang, garbage: int) -> None:
    agent = gang.agent("1:1", f"--rdzv-endpoint=127.0.0.1:{garbage}", conf="connect_timeout=2")
    assert agent.wait() == 3
    assert f"http://127.0.0.1:{garbage}" in agent.output()
    assert "Traceback" not in agent.output()


def test_etcd_without_v2_api_is_reported(gang: Gang) -> None:
    agent = gang.agent("1:1", "--rdzv-backend=etcd-v2")
    assert agent.wait() == 3, agent.output()
    assert f"{gang.etcd.url} (etcd 3.7" in agent.output()
    assert "no v2 API" in agent.output()
    assert "Traceback" not in agent.output()


def test_agent_waits_for_etcd_v2_outage_to_end(gang: Gang, start_etcd) -> None:
    gang.etcd = etcd = start_etcd("3.5.35", arguments=("--enable-v2",))
    etcd.kill()
    agent = gang.agent("1:1", "--rdzv-backend=etcd-v2", "--local-addr=127.0.0.1")
    agent.says("no rendezvous yet, trying again")
    etcd.start()
    gang.started(1, 1)
    gang.finish()
    assert agent.wait() == 0, agent.output()


def test_script_with_import_error_is_reported(gang: Gang, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import a_module_that_nobody_has\n")
    agent = gang.agent("1:1", "--max-restarts=1", command=(str(script),))
    assert agent.wait() == 1
    summary = agent.output().rpartition(f"job {gang.run_id} failed")[2]
    assert "rank 0 (local rank 0 on node-0) in round 2: exit code 1, UserError" in summary
    assert "ModuleNotFoundError: No module named 'a_module_that_nobody_has'" in summary
    assert gang.round().charged == (1, 2)


def test_program_that_cannot_be_executed_is_reported(gang: Gang, tmp_path: Path) -> None:
    program = tmp_path / "train"
    program.write_text("no #! line, and nothing that runs\n")
    program.chmod(0o755)
    agent = gang.agent("1:1", "--max-restarts=0", "--no-python", command=(str(program),))
    assert agent.wait() == 1, agent.output()
    assert "exit code 126, LaunchError" in agent.output()


def test_unwritable_log_folder_does_not_stop_training(gang: Gang, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / f"{gang.run_id}_node-0").write_text("a file where the folder would be")
    agent = gang.agent("1:1", f"--log-dir={logs}")
    gang.started(1, 1)
    gang.finish()
    assert agent.wait() == 0, agent.output()
    assert "worker logs are incomplete" in agent.output()


def train_beside_hanging_file(gang: Gang, folder: Path, name: str) -> AgentProcess:
    """Run a node to its success with a log folder in which opening this file blocks."""
    path = folder / "logs" / f"{gang.run_id}_node-0" / name
    path.parent.mkdir(parents=True)
    os.mkfifo(path)  # opening it blocks, as a call to a dead network disk does
    agent = gang.agent("1:1", f"--log-dir={folder / 'logs'}")
    gang.started(1, 1)
    gang.finish()
    assert agent.wait() == 0, agent.output()
    return agent


def test_node_trains_although_the_disk_of_its_preload_record_hangs(
    gang: Gang, tmp_path: Path
) -> None:
    train_beside_hanging_file(gang, tmp_path, "preload.json")


def test_agent_ends_although_the_disk_of_its_logs_hangs(gang: Gang, tmp_path: Path) -> None:
    agent = train_beside_hanging_file(gang, tmp_path, "round_1/base_rank")
    assert "round 1 has none: the disk does not answer" in agent.output()


def test_logs_and_progress_of_every_round_are_kept(gang: Gang, tmp_path: Path) -> None:
    agent = gang.agent("1:1", "--nproc-per-node=2", f"--log-dir={tmp_path / 'logs'}")
    first = gang.started(1, 2)
    folder = tmp_path / "logs" / f"{gang.run_id}_node-0"
    assert first[1]["TORCHELASTIC_ERROR_FILE"] == str(folder / "round_1" / "1" / "error.json")
    gang.fail(1)
    second = gang.started(2, 2)
    told = {worker["ELASTICJOB_PROGRESS_FILE"] for worker in (*first, *second)}
    assert told == {str(folder / f"round_{n}" / r / "progress") for n in (1, 2) for r in "01"}
    gang.finish()
    assert agent.wait() == 0, agent.output()
    assert "told to fail" in (folder / "round_1" / "1" / "stderr.log").read_text()
    assert (folder / "round_2" / "0" / "stdout.log").exists()


def test_workers_have_error_files_without_log_folder(gang: Gang, tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}
    script = tmp_path / "reports.py"
    script.write_text(
        "import json, os, pathlib, sys\n"
        "print('on the console')\n"
        "report = {'message': {'message': 'told in the error file', 'extraInfo': {}}}\n"
        "path = pathlib.Path(os.environ['TORCHELASTIC_ERROR_FILE'])\n"
        "assert path.name == 'error.json' and list(path.parent.glob('*.log')) == []\n"
        "path.write_text(json.dumps(report))\n"
        "sys.exit(3)\n"
    )
    agent = gang.agent("1:1", "--max-restarts=1", command=(str(script),), env=env)
    assert agent.wait() == 1
    summary = agent.output().rpartition(f"job {gang.run_id} failed")[2]
    assert "told in the error file" in summary
    assert agent.output().count("on the console") == 2
    assert list(tmp_path.glob("elasticjob-*")) == []


def test_run_id_may_contain_space(gang: Gang) -> None:
    gang.run_id = f"{gang.run_id} two"
    agents = [gang.agent("2:2") for _ in range(2)]
    workers = gang.started(1, 2)
    assert {worker["TORCHELASTIC_RUN_ID"] for worker in workers} == {gang.run_id}
    gang.finish()
    assert [agent.wait() for agent in agents] == [0, 0], gang.outputs()


def test_handled_signals_come_from_torch_variable(gang: Gang) -> None:
    names = "SIGUSR1, SIGQUIT"
    agent = gang.agent("1:1", env={"TORCHELASTIC_SIGNALS_TO_HANDLE": names})
    (worker,) = gang.started(1, 1)
    assert worker["TORCHELASTIC_SIGNALS_TO_HANDLE"] == names
    agent.signal(signal.SIGUSR1)
    assert agent.wait() == 0, agent.output()
    assert "SIGUSR1" in agent.output()
    assert not Path(f"/proc/{worker['pid']}").exists()


def test_next_agent_removes_files_of_killed_agent(gang: Gang, tmp_path: Path) -> None:
    env = {"TMPDIR": str(tmp_path)}
    lives, killed = (gang.agent("1:3", conf=QUICK, env=env) for _ in range(2))
    until(lambda: len(list(tmp_path.glob("elasticjob-agent-*"))) == 2, "their folders")
    killed.signal(signal.SIGKILL)
    killed.wait()
    third = gang.agent("1:3", conf=QUICK, env=env)
    third.says("whose process was killed")
    until(lambda: len(list(tmp_path.glob("elasticjob-agent-*"))) == 2, "two folders")
    gang.finish()
    assert [lives.wait(), third.wait()] == [0, 0], gang.outputs()
    assert list(tmp_path.glob("elasticjob-*")) == []


def test_first_ctrl_c_leaves_in_order_and_second_ends_at_once(gang: Gang, tmp_path: Path) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: open(sys.argv[1], 'w').close())\n"
        "open(sys.argv[2], 'w').close()\n"
        "time.sleep(600)\n"
    )
    asked, ready = tmp_path / "asked", tmp_path / "ready"
    command = (str(script), str(asked), str(ready))
    agent = gang.agent("1:1", command=command, conf="stop_grace=600")
    until(ready.exists, "the worker")
    agent.signal(signal.SIGINT)
    until(asked.exists, "the worker's SIGTERM")
    agent.signal(signal.SIGINT)
    assert agent.wait() == 0, agent.output()


@pytest.mark.parametrize("streams", [">&-", "<&- >&-", "> /dev/full", "| true"])
def test_unread_output_does_not_change_outcome(gang: Gang, streams: str) -> None:
    words = [sys.executable, "-m", "elasticjob_cli", "agent", f"--rdzv-conf={QUICK}"]
    words += [f"--rdzv-endpoint=127.0.0.1:{gang.etcd.port}", f"--rdzv-id={gang.run_id}"]
    command = shlex.join([*words, str(gang.script), str(gang.folder)])
    gang.finish()
    ran = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command} {streams}"],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_SECONDS,
    )
    assert ran.returncode == 0, ran.stderr
    assert "Traceback" not in ran.stderr


def test_repeated_signals_do_not_change_outcome(gang: Gang) -> None:
    agent = gang.agent("1:1")
    gang.started(1, 1)

    def ended() -> bool:
        agent.signal(signal.SIGTERM)
        return agent.process.poll() is not None

    until(ended, "its end")
    assert agent.process.returncode == 0, agent.output()
    assert agent.output().endswith("node-0 left (SIGTERM)\n")


def test_agent_waits_for_etcd_lost_before_first_round(gang: Gang, start_etcd) -> None:
    etcd: EtcdServer = start_etcd()
    gang.etcd = etcd
    agents = [gang.agent("2:2")]
    agents[0].says("round 1 is joinable")
    etcd.kill()
    agents.append(gang.agent("2:2"))
    agents[1].says("; retrying")
    etcd.start()
    workers = gang.started(1, 2)
    assert all(alive(worker["pid"]) for worker in workers)
    gang.finish()
    assert [agent.wait() for agent in agents] == [0, 0], gang.outputs()
