"""`elasticjob run` and the control commands, with real etcd and real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from elasticjob_launcher.worker_count import usable_cpus
from tests.integration.etcd_server import NEWEST, binary
from tests.integration.local_rig import CALL_SECONDS, PATIENCE_SECONDS, LocalRig, rig, until

__all__ = ["rig"]


def test_job_runs_to_success_and_remains_readable(rig: LocalRig) -> None:
    runner = rig.start(rig.manifest(), "--plain", "--logs")
    rig.running(2)  # a job that ends at once may never be seen in this phase
    rig.finish()
    output, _ = runner.communicate(timeout=CALL_SECONDS)
    assert runner.returncode == 0, output
    assert "Succeeded" in output
    assert "rank 1 of 2 round 1" in output
    rig.nothing_left()
    table = rig.call("get").stdout.splitlines()
    assert table[0].split() == [
        "NAME",
        "PHASE",
        "RENDEZVOUS",
        "ROUND",
        "NODES",
        "WANTED",
        "RESTARTS",
        "AGE",
    ]
    assert table[1].split()[:4] == ["job", "Succeeded", "closed", "1"]
    assert "MASTER" in rig.call("get", "-o", "wide").stdout
    assert rig.call("get", "-o", "name").stdout == "elasticjob.elasticjob.dev/job\n"
    listed = json.loads(rig.call("get", "-o", "json").stdout)
    assert listed["kind"] == "List"
    shown = yaml.safe_load(rig.call("get", "job", "-o", "yaml").stdout)
    assert shown == listed["items"][0]
    assert shown["status"]["phase"] == "Succeeded"
    assert rig.call("get", "job", "-w").returncode == 0  # ended: the watch ends as well
    assert "rank 1 of 2 round 1" in rig.call("logs", "job").stdout
    assert rig.call("logs", "job", "--rank", "1").stdout.splitlines() == [
        "[elasticjob] round 1 begins: 2 nodes; cause start",
        "job-1 [1] rank 1 of 2 round 1",
    ]
    newest = rig.call("logs", "job", "--rank", "0", "--tail", "1", "--timestamps", "--since", "1h")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\S{18}Z job-0 \[0\] rank 0 .*\n", newest.stdout)
    nothing = rig.call("logs", "job", "--tail", "0")
    assert (nothing.stdout, nothing.stderr) == ("", "job: no line matches the options\n")
    assert "there is no round 9; rounds: 1" in rig.call("logs", "job", "--round", "9").stderr
    events = rig.call("events", "job").stdout
    assert re.search(r"^\d\d:\d\d:\d\d pod job-0 started$", events, re.M)
    assert re.search(r"^\S+ Running, round 1 final: 2 nodes, 2 workers, master job-0", events, re.M)
    told = json.loads(rig.call("events", "job", "-o", "json").stdout)
    assert told == yaml.safe_load(rig.call("events", "job", "-o", "yaml").stdout)
    assert [each["message"] for each in told] == [line[9:] for line in events.splitlines()]
    assert "use -o json" in rig.call("events", "job", "-o", "name").stderr
    described = rig.call("describe", "job").stdout
    assert "Rounds (times in milliseconds):" in described
    assert rig.call("delete", "job").returncode == 0
    gone = rig.call("get", "job")
    assert (gone.returncode, 'local job "job" not found' in gone.stderr) == (1, True)


@pytest.mark.parametrize("version", ["3.4", NEWEST])
def test_etcd_is_called_once_and_does_not_wait_for_the_disk(rig: LocalRig, version: str) -> None:
    calls, program = rig.tmp / "calls", rig.tmp / "bin" / "etcd"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$1" >> {calls}\nexec {binary(version)} "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{rig.env['PATH']}"
    rig.finish()
    ran = rig.call("run", rig.manifest(), "--plain", env={"PATH": path})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert calls.read_text().splitlines() == ["--name=local"]
    log = (rig.state / "elasticjob/default/job/logs/etcd.log").read_text()
    assert re.search("recognized and used environment variable.*ETCD_UNSAFE_NO_FSYNC", log)


def test_command_that_takes_the_ranks_from_its_workers_is_reported(rig: LocalRig) -> None:
    (rig.job / "show.py").write_text("import os; print('rank', os.environ.get('RANK'))")
    command = ["env", "-i", sys.executable, "show.py"]
    manifest = rig.manifest(command=command, nprocPerNode=2, nodes=1)
    text = (
        "env -i keeps the variables of the job from the program that it runs: workers have no RANK"
    )
    checked = rig.call("validate", "--strict", manifest)
    assert (checked.returncode, text in checked.stdout + checked.stderr) == (3, True)
    ran = rig.call("run", manifest, "--plain", "--logs")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "rank None" in ran.stdout
    assert f"warning (EnvironmentCleared): {text}" in ran.stdout + ran.stderr


def test_script_that_takes_the_ranks_from_its_workers_is_reported(rig: LocalRig) -> None:
    (rig.job / "run.sh").write_text("#!/bin/sh\ncd .\nexec env -i python3 -c 'print(1)'\n")
    manifest = rig.manifest(command=["sh", "run.sh"], launch="PerWorker", nprocPerNode=2, nodes=1)
    ran = rig.call("run", manifest, "--plain", "--logs")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "a script of the command: env -i keeps the variables" in ran.stdout


@pytest.mark.parametrize(
    ("nproc", "command", "workers"),
    [
        ("cpu", ["python3", "work.py"], usable_cpus()),
        ("2", ["python3", "work.py"], 2),
        (None, ["python3", "work.py"], 1),
        (None, ["torchrun", "--nproc-per-node=$(WORKERS)", "work.py"], 3),
    ],
)
def test_workers_per_node_are_counted_in_the_trainer(
    rig: LocalRig, nproc: str | None, command: list[str], workers: int
) -> None:
    rig.finish()
    manifest = rig.manifest(command=command, nodes=1, nprocPerNode=nproc)
    ran = rig.call("run", manifest, "--plain", "--logs", env={"WORKERS": "3"})
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"1 node, {workers} worker" in ran.stdout
    assert f"rank {workers - 1} of {workers} round 1" in ran.stdout
    rig.nothing_left()


def test_job_that_needs_accelerators_is_refused_on_a_machine_without(rig: LocalRig) -> None:
    ran = rig.call("run", rig.manifest(nodes=1, nprocPerNode="gpu"), "--plain")
    assert ran.returncode != 0
    assert "Nothing was started" in ran.stderr
    assert "--nproc-per-node 1" in ran.stderr
    assert not rig.workers()
    rig.nothing_left()


def test_manifest_can_be_read_from_pipe(rig: LocalRig) -> None:
    """The manifest's command then runs in `elasticjob`'s working directory."""
    rig.finish()
    text = rig.manifest().read_text()
    command = rig.command("run", "-", "--plain")
    ran = subprocess.run(
        command, cwd=rig.job, env=rig.env, input=text, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads((rig.state / "elasticjob/default/job/run.json").read_text())["manifest"] == (
        "standard input"
    )
    rig.nothing_left()


@pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
def test_status_reports_warm_starts(rig: LocalRig, cold: bool) -> None:
    command = ["sh", "-c", "python3 work.py; exit $?"] if cold else ["python3", "work.py"]
    runner = rig.start(rig.manifest(command=command), "--plain")
    first = rig.running(2)["rendezvous"]["round"]
    until(lambda: len(rig.workers()) == 2, "two workers")
    os.kill(rig.workers()[0], signal.SIGKILL)
    rig.running(2, after=first)
    until(lambda: rig.status()["rounds"][-1].get("startMs"), "the start of the second round")
    status = rig.status()
    rounds = [found for found in status["rounds"] if found.get("startMs")]
    members = status["members"]
    explained = rig.call("explain", "job").stdout
    described = rig.call("describe", "job").stdout
    if cold:
        assert all(found["coldNodes"] == found["nodes"] for found in rounds)
        assert all("shell" in found["coldReason"] for found in rounds)
        assert {member["start"] for member in members} == {"cold"}
        assert "Workers started cold on all 2 nodes: " in explained
        assert f"cold: {members[0]['coldReason']}" in described
    else:
        assert all(found["coldNodes"] == 0 for found in rounds)
        assert [(m["start"], m.get("coldReason")) for m in members] == [("warm", None)] * 2
        assert "cold" not in explained
    rig.finish()
    assert runner.wait(PATIENCE_SECONDS) == 0


def test_running_job_scales_up_and_down(rig: LocalRig) -> None:
    runner = rig.start(rig.manifest(), "--plain")
    first = rig.running(2)["rendezvous"]["round"]

    scaled = rig.call("scale", "job", "--nodes", "3")
    assert scaled.stdout == "elasticjob.elasticjob.dev/job scaled to 3 nodes\n"
    grown = rig.running(3, after=first)
    assert grown["wantedNodes"] == 3
    assert grown["rendezvous"]["cause"]["kind"] == "join"

    single = rig.call("scale", "job", "--replicas", "1")
    assert single.stdout == "elasticjob.elasticjob.dev/job scaled to 1 node\n"
    shrunk = rig.running(1, after=grown["rendezvous"]["round"])
    assert [member["pod"] for member in shrunk["members"]] == ["job-0"]

    clamped = rig.call("scale", "job", "--nodes", "9")
    assert "scaled to 3 nodes (9 is not a legal size of this job)" in clamped.stdout
    rig.running(3, after=shrunk["rendezvous"]["round"])
    rig.finish()
    assert runner.wait(PATIENCE_SECONDS) == 0
    assert rig.status()["restarts"] == 0
    rig.nothing_left()


def test_job_survives_death_of_nodes_and_workers(rig: LocalRig) -> None:
    runner = rig.start(rig.manifest(), "--plain")
    number = rig.running(2)["rendezvous"]["round"]
    until(lambda: len(rig.workers()) == 2, "two workers")

    before = rig.workers()
    assert "killed the agent of job-1" in rig.call("fault", "kill-agent", "job", "job-1").stdout
    log = rig.state / "elasticjob/default/job/logs/job-1/agent.log"
    until(lambda: "took over round" in log.read_text(), "the agent to be back")
    assert rig.workers() == before  # they never noticed
    assert rig.round() == number

    os.kill(before[0], signal.SIGKILL)
    status = rig.running(2, after=number)
    assert status["restarts"] == 1
    assert status["firstFailure"]["signal"] == 9
    assert status["firstFailure"]["rank"] == 0

    lost = status["rendezvous"]["round"]
    assert rig.call("fault", "kill-node", "job", "job-1").returncode == 0
    status = rig.running(2, after=lost)
    assert [member["pod"] for member in status["members"]] == ["job-0", "job-2"]
    assert status["avoidedNodes"] == [], "there is no other machine"

    drained = status["rendezvous"]["round"]
    assert rig.call("fault", "drain", "job", "job-0").returncode == 0
    status = rig.running(2, after=drained)
    assert "job-0" not in [member["pod"] for member in status["members"]]
    assert status["restarts"] == 1  # losses and leaves are free

    wrong = rig.call("fault", "drain", "job", "job-77")
    assert (wrong.returncode, 'no running pod "job-77"; running are: ' in wrong.stderr) == (2, True)
    rig.finish()
    assert runner.wait(PATIENCE_SECONDS) == 0
    rounds = json.loads((rig.state / "elasticjob/default/job/rounds.json").read_text())
    causes = [item["cause"] for item in rounds]
    assert causes[:2] == ["start", "failure"]
    assert {"loss", "leave"} <= set(causes)
    rig.nothing_left()


def test_delete_ends_and_removes_running_job(rig: LocalRig) -> None:
    runner = rig.start(rig.manifest(), "--plain")
    rig.running(2)

    deleted = rig.call("delete", "job")

    assert deleted.stdout == 'elasticjob.elasticjob.dev "job" deleted\n'
    assert runner.wait(PATIENCE_SECONDS) == 130
    assert rig.object() == {}
    rig.nothing_left()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_job_drains_and_ends_cleanly(rig: LocalRig, signum: signal.Signals) -> None:
    runner = rig.start(rig.manifest(), "--plain")
    rig.running(2)

    runner.send_signal(signum)

    assert runner.wait(PATIENCE_SECONDS) == 130
    status = rig.status()
    assert status["phase"] == "Suspended"
    assert status["restarts"] == 0
    rig.nothing_left()


def test_repeated_signals_do_not_suppress_final_summary(rig: LocalRig) -> None:
    runner = rig.start(rig.manifest(), "--plain")
    rig.running(2)

    def ended() -> bool:
        runner.send_signal(signal.SIGTERM)
        return runner.poll() is not None

    until(ended, "its end")
    assert runner.returncode == 130
    assert runner.stdout is not None
    assert "job: Suspended after" in runner.stdout.read()
    rig.nothing_left()


def test_unread_output_does_not_change_outcome(rig: LocalRig) -> None:
    rig.finish()
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            rig.command("run", "--plain", rig.manifest()),
            env=rig.env,
            cwd=rig.job,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=240,
        )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == "elasticjob: the output cannot be written: No space left on device\n"
    rig.nothing_left()


def test_job_with_unread_output_drains(rig: LocalRig) -> None:
    """`| head -1` has this effect, or a Ctrl-C that ends the `tee` behind the pipe first."""
    runner = rig.start(rig.manifest(), "--plain")
    rig.running(2)
    assert runner.stdout is not None
    runner.stdout.close()
    runner.stdout = None
    rig.call("scale", "job", "--nodes", "3")  # reported, unless another event was
    assert runner.wait(PATIENCE_SECONDS) == 130
    assert rig.status()["phase"] == "Suspended"
    rig.nothing_left()


@pytest.mark.parametrize(
    ("times", "delays"),
    [(1, (0.0, 0.05, 0.2)), (2, (0.02, 0.1, 0.4))],
    ids=["once", "twice"],
)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_during_cluster_start_leaves_nothing(
    rig: LocalRig, signum: signal.Signals, times: int, delays: tuple[float, ...]
) -> None:
    lock = rig.state / "elasticjob" / "default" / "job" / "lock"
    for after_seconds in delays:
        lock.unlink(missing_ok=True)
        runner = rig.start(rig.manifest(), "--plain")
        until(lock.exists, "the first thing that it makes")
        with contextlib.suppress(subprocess.TimeoutExpired):
            runner.wait(after_seconds)
        for _ in range(times):
            runner.send_signal(signum)
        assert runner.wait(PATIENCE_SECONDS) == 130
        assert runner.stdout is not None
        said = runner.stdout.read()
        assert "Traceback" not in said, said
        assert "interrupted before the job began" in said or "job: " in said, said
        rig.nothing_left()


def test_second_interrupt_kills_unresponsive_workers(rig: LocalRig) -> None:
    (rig.job / "stubborn").touch()
    grace = {"stopGraceSeconds": 600}
    runner = rig.start(rig.manifest(recovery=grace), "--plain")
    rig.running(2)
    until(lambda: len(rig.workers()) == 2, "two workers")

    runner.send_signal(signal.SIGINT)
    until(lambda: rig.status()["phase"] == "Suspending", "the drain to begin")
    assert runner.poll() is None
    runner.send_signal(signal.SIGINT)

    assert runner.wait(PATIENCE_SECONDS) == 130, "the workers' grace period is longer"
    rig.nothing_left()


def test_killed_runner_leaves_nothing(rig: LocalRig) -> None:
    (rig.job / "daemon").touch()
    runner = rig.start(rig.manifest(), "--plain")
    rig.running(2)
    until(lambda: len(rig.workers()) == 2, "two workers")
    before = rig.processes()
    for part in (
        "supervisor.py",
        "etcd",
        "elasticjob_agent",
        "launcher.pyz",
        "work.py",
        "sleep 1000",
    ):
        assert any(part in command for command in before.values()), (part, before)
    assert set(rig.workers().values()) <= before.keys()

    runner.kill()

    runner.wait(PATIENCE_SECONDS)
    rig.nothing_left()
    assert rig.status()["phase"] == "Running"  # the last known one
    # A process that ends gives up its memory, by which it is found, before its files and locks.
    until(lambda: "not running" in rig.call("describe", "job").stdout, "the lock to be released")
    refused = rig.call("scale", "job", "--nodes", "1")
    assert (refused.returncode, "is not running" in refused.stderr) == (2, True)
    rig.finish()
    assert rig.call("run", rig.manifest(), "--plain").returncode == 0  # the name is free


def test_killed_supervisor_leaves_nothing(rig: LocalRig) -> None:
    (rig.job / "daemon").touch()
    runner = rig.start(rig.manifest(), "--plain")
    rig.running(2)
    until(lambda: len(rig.workers()) == 2, "two workers")
    supervisor = next(pid for pid, command in rig.processes().items() if "supervisor.py" in command)

    os.kill(supervisor, signal.SIGKILL)

    output, _ = runner.communicate(timeout=PATIENCE_SECONDS)
    assert runner.returncode == 1
    assert "the supervisor of this job's processes was killed" in output
    rig.nothing_left()


@pytest.fixture
def own_temporary_folder(rig: LocalRig) -> Iterator[None]:
    """Use a temporary folder of this rig that is short enough for sockets.

    Runs with a longer one share /tmp, in which each run removes the remains of all others.
    """
    with tempfile.TemporaryDirectory(prefix="ej-", ignore_cleanup_errors=True) as folder:
        rig.env["TMPDIR"] = folder
        yield


@pytest.mark.usefixtures("own_temporary_folder")
def test_next_run_removes_remains_of_killed_run_and_supervisor(rig: LocalRig) -> None:
    runner = rig.start(rig.manifest(), "--plain")
    rig.running(2)
    [left] = rig.run_dirs
    supervisor = next(pid for pid, command in rig.processes().items() if "supervisor.py" in command)

    os.kill(supervisor, signal.SIGSTOP)
    runner.kill()
    os.kill(supervisor, signal.SIGKILL)
    runner.wait(PATIENCE_SECONDS)
    until(lambda: not rig.processes(), "the rest to end with them")
    assert left.exists()

    living = rig.start(rig.manifest("living"), "--plain")
    until(lambda: rig.status("living").get("phase") == "Running", "the next run")
    assert not left.exists()
    rig.note_run_dirs()
    rig.finish()
    assert rig.call("run", rig.manifest(), "--plain").returncode == 0
    assert living.wait(PATIENCE_SECONDS) == 0, "no run is hurt by another's start"
    rig.nothing_left()


def test_training_survives_etcd_outage(rig: LocalRig) -> None:
    runner = rig.start(rig.manifest(), "--plain")
    number = rig.running(2)["rendezvous"]["round"]
    until(lambda: len(rig.workers()) == 2, "two workers")
    before = rig.workers()
    etcd = next(pid for pid, command in rig.processes().items() if "--data-dir" in command)

    os.kill(etcd, signal.SIGKILL)
    until(
        lambda: any("--data-dir" in c and p != etcd for p, c in rig.processes().items()),
        "etcd to be started again",
    )
    until(lambda: rig.status()["rendezvous"]["state"] == "final", "the informer cache to be back")
    assert (rig.workers(), rig.round()) == (before, number)  # the workers never noticed
    assert rig.call("scale", "job", "--nodes", "3").returncode == 0
    grown = rig.running(3, after=number)

    assert grown["rendezvous"]["cause"]["kind"] == "join"
    assert grown["restarts"] == 0
    rig.finish()
    output, _ = runner.communicate(timeout=PATIENCE_SECONDS)
    assert runner.returncode == 0, output
    assert "etcd ended (signal 9)" in output
    rig.nothing_left()


def test_run_with_removed_folder_ends_with_error(rig: LocalRig) -> None:
    """A cleaner of temporary folders removed it: the etcd in it cannot come back."""
    runner = rig.start(rig.manifest(), "--plain")
    rig.running(2)
    etcd, command = next(found for found in rig.processes().items() if "--data-dir" in found[1])
    folder = Path(command.split("--data-dir=")[1].split()[0]).parent
    shutil.rmtree(folder)
    with contextlib.suppress(ProcessLookupError):  # it may have noticed by itself
        os.kill(etcd, signal.SIGKILL)

    output, _ = runner.communicate(timeout=PATIENCE_SECONDS)
    assert runner.returncode == 1
    assert f"the folder {folder} of this run was removed" in output
    rig.nothing_left()


def test_logs_follow_rank_through_rounds(rig: LocalRig) -> None:
    runner = rig.start(rig.manifest(), "--plain")
    number = rig.running(2)["rendezvous"]["round"]
    follower = rig.start_other("logs", "job", "--rank", "0", "-f")
    assert follower.stdout is not None
    assert follower.stdout.readline() == "[elasticjob] round 1 begins: 2 nodes; cause start\n"
    assert follower.stdout.readline() == "job-0 [0] rank 0 of 2 round 1\n"
    until(lambda: len(rig.workers()) == 2, "two workers")
    titles, row = rig.call("top").stdout.splitlines()
    assert (titles.split()[0], row.split()[:4]) == ("NAME", ["job", "Running", "2/2", "2"])
    assert rig.call("fault", "kill-worker", "job", "job-1").returncode == 0
    rig.running(2, after=number)
    rig.finish()
    assert runner.wait(PATIENCE_SECONDS) == 0

    output, _ = follower.communicate(timeout=PATIENCE_SECONDS)
    assert "job-0 [0] rank 0 of 2 round 2" in output.splitlines()
    whole = rig.call("logs", "job").stdout.splitlines()
    mark = next(line for line in whole if line.startswith("[elasticjob] round 2 begins: 2 nodes"))
    assert "cause failure: job-1" in mark
    at = whole.index(mark)
    assert not any("round 2" in line for line in whole[:at])
    assert not any("round 1" in line for line in whole[at:])
    only = rig.call("logs", "job", "--round", "1").stdout.splitlines()
    assert only == whole[:at]
    picture = rig.job / "rounds.svg"
    assert rig.call("timeline", "job", "-f", str(picture)).stdout == f"wrote {picture}\n"
    assert "2  failure: job-1" in picture.read_text()
    wrong = rig.call("logs", "job", "--rank", "5")
    assert (wrong.returncode, "ranks are 0 to 1" in wrong.stderr) == (2, True)
