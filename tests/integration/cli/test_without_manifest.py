"""Local jobs of a script or a command without a manifest, and manifests made by `init`."""

from __future__ import annotations

import signal

import pytest
import yaml

from tests.integration.local_rig import PATIENCE_SECONDS, LocalRig, rig, until

__all__ = ["rig"]

SCRIPT = "import os, sys; print('rank', os.environ['RANK'], 'got', sys.argv[1:])\n"


def test_script_runs_without_manifest_and_gets_its_own_words(rig: LocalRig) -> None:
    (rig.job / "hello.py").write_text(SCRIPT)
    ran = rig.call("run", "hello.py", "--nodes", "1:2", "--plain", "--lr", "$(HOME)", "--plain")
    assert ran.returncode == 0, ran.stderr
    assert "hello: no worker reported a training step; the output of rank 0 ends: " in ran.stdout
    spec = rig.object("hello")["spec"]
    assert (spec["minNodes"], spec["maxNodes"]) == (1, 2)
    said = rig.call("logs", "hello").stdout
    assert "hello-1 [1] rank 1 got ['--lr', '$(HOME)', '--plain']" in said
    rig.nothing_left()


def test_command_after_dashes_runs_with_its_launcher_taken_out(rig: LocalRig) -> None:
    (rig.job / "hello.py").write_text(SCRIPT)
    command = ["torchrun", "--nproc-per-node", "2", "hello.py", "--name", "x"]
    ran = rig.call("run", "--plain", "--name", "two", "--", *command)
    assert ran.returncode == 0, ran.stderr
    assert "two-0 [1] rank 1 got ['--name', 'x']" in rig.call("logs", "two").stdout
    rig.nothing_left()


def test_number_of_restarts_can_be_chosen(rig: LocalRig) -> None:
    (rig.job / "fail.py").write_text("import sys; sys.exit(3)\n")
    ran = rig.call("run", "fail.py", "--max-restarts", "0", "--plain")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "(no restarts allowed)" in ran.stderr
    assert rig.object("fail")["spec"]["maxRestarts"] == 0
    assert "round 2" not in ran.stdout
    refused = rig.call("run", "fail.py", "--max-restarts", "-1")
    assert (refused.returncode, "--max-restarts" in refused.stderr) == (2, True)


def test_size_that_is_not_legal_is_said_before_the_start(rig: LocalRig) -> None:
    rig.finish()
    ran = rig.call("run", rig.manifest(command=["sleep", "3"]), "--nodes", "7", "--plain")
    assert ran.returncode == 0, ran.stderr
    assert "7 is not a legal size of this job; starting 3 nodes\n" in ran.stderr
    assert "3 nodes, 3 workers" in ran.stdout


def test_run_without_step_and_output_names_the_probable_reason(rig: LocalRig) -> None:
    (rig.job / "done.py").write_text("")
    ran = rig.call("run", "done.py", "--plain")
    assert ran.returncode == 0, ran.stderr
    assert (
        "done: no worker reported a training step and rank 0 printed nothing; if its checkpoint "
        "says that all is done, remove that to begin again\n"
    ) in ran.stdout


def test_manifest_of_init_is_valid_and_is_not_replaced(rig: LocalRig) -> None:
    (rig.job / "hello.py").write_text(SCRIPT)
    made = rig.call("init", "hello.py", "--nodes", "2:3", "--lr", "a'b\"c: #{}", "--name", "x")
    assert made.returncode == 0, made.stderr
    checked = rig.call("validate", "--strict", "hello.yaml")
    assert (checked.returncode, checked.stderr) == (0, "")
    before = (rig.job / "hello.yaml").read_text()
    spec = yaml.safe_load(before)["spec"]
    assert (spec["minNodes"], spec["maxNodes"]) == (2, 3)
    [container] = spec["template"]["spec"]["containers"]
    assert container["command"][1:] == ["hello.py", "--lr", "a'b\"c: #{}", "--name", "x"]
    again = rig.call("init", "hello.py")
    assert again.returncode == 2
    assert "exists and was not changed" in again.stderr
    assert (rig.job / "hello.yaml").read_text() == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("run", "a script, a manifest or -- and a command must be given"),
        ("run nothing.py", "the script 'nothing.py' does not exist"),
        ("run -- nothing-there", "'nothing-there' is not on PATH"),
        ("run job.yaml extra", "job.yaml is taken for a manifest, which has no arguments: 'extra'"),
        ("run -f job.yaml extra", "-f job.yaml must come without 'extra'"),
        ("run job.yaml --nodes 1:2", "--nodes must be one number for a manifest"),
        ("run gpu.yaml", "asks for 4 accelerators for each node (nvidia.com/gpu)"),
        ("run ./tool", "tool is a program: `elasticjob run -- ./tool` runs it"),
        ("init job.yaml", "init takes a Python script or a folder"),
        ("init job.yaml --nodes 2", "init takes a Python script or a folder"),
        ("agent --standalone --rdzv-id x work.py", "--rdzv-id must not be given with --standalone"),
        ("agent --standalone --nnodes 1:2 work.py", "--standalone runs one node"),
        ("agent --nnodes 2 --rdzv-backend static work.py", "give c10d on every node instead"),
        ("agent --nnodes 2 --rdzv-backend c10d work.py", "--rdzv-id must be given"),
    ],
)
def test_bad_input_starts_nothing(rig: LocalRig, words: str, said: str) -> None:
    text = rig.manifest().read_text()
    limits = '"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": 4}}'
    (rig.job / "gpu.yaml").write_text(text.replace('"name": "trainer"', limits))
    (rig.job / "tool").write_text("#!/bin/sh\n")
    (rig.job / "tool").chmod(0o755)
    ran = rig.call(*words.split(), env={"NVIDIA_VISIBLE_DEVICES": "none"})
    assert ran.returncode == 2
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not rig.object()


def test_standalone_agent_needs_no_rendezvous_options(rig: LocalRig) -> None:
    (rig.job / "hello.py").write_text(SCRIPT)
    ran = rig.call("agent", "--standalone", "--nproc-per-node", "2", "hello.py", "--lr", "1")
    assert ran.returncode == 0, ran.stderr
    assert "rank 1 got ['--lr', '1']" in ran.stdout


def test_agent_accepts_torchruns_command_line_and_variables(rig: LocalRig) -> None:
    (rig.job / "hello.py").write_text(SCRIPT)
    words = "--nnodes 1 --node-rank 0 --master-addr here --master-port 29500 --monitor-interval 5"
    words += " --virtual-local-rank -r 0:3 --tee 1:1,2:1 --local-ranks-filter 0,1 --log-dir logs"
    variables = {
        "PET_NPROC_PER_NODE": "3",
        "PET_RDZV_BACKEND": "static",
        "PET_START_METHOD": "spawn",
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${local_rank} of ${rank}>",
    }
    ran = rig.call("agent", *words.split(), "hello.py", env=variables)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0] == "<default 1 of 1>rank 1 got []"
    assert "rank 0" not in ran.stdout
    assert "rank 2" not in ran.stdout
    for name in ("--node-rank", "--master-addr", "--monitor-interval", "--start-method"):
        assert f"{name} has no effect: " in ran.stderr
    for rank in (0, 1, 2):
        (log,) = (rig.job / "logs").glob(f"*/round_1/{rank}/stdout.log")
        assert log.read_text() == f"rank {rank} got []\n"


@pytest.mark.parametrize(
    "rendezvous",
    ["c10d --rdzv-endpoint=localhost:0", "static", "static --rdzv-endpoint=127.0.0.1:29500"],
)
def test_one_node_may_host_its_store_at_any_port(rig: LocalRig, rendezvous: str) -> None:
    (rig.job / "hello.py").write_text(SCRIPT)
    words = f"--nnodes=1 --rdzv-backend={rendezvous} --rdzv-id=one"
    ran = rig.call("agent", *words.split(), "hello.py")
    assert ran.returncode == 0, ran.stderr
    assert "job one succeeded" in ran.stdout


def test_one_node_with_c10d_needs_neither_endpoint_nor_id(rig: LocalRig) -> None:
    (rig.job / "hello.py").write_text(SCRIPT)
    ran = rig.call("agent", "--nnodes=1", "--rdzv-backend=c10d", "hello.py")
    assert ran.returncode == 0, ran.stderr
    assert " succeeded" in ran.stdout


def test_variables_do_not_contradict_standalone(rig: LocalRig) -> None:
    (rig.job / "hello.py").write_text(SCRIPT)
    variables = {"PET_NNODES": "4", "PET_RDZV_ENDPOINT": "nowhere:1", "PET_RDZV_ID": "other"}
    ran = rig.call("agent", "--standalone", "hello.py", env=variables)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_standalone_agent_does_not_exit_as_if_it_had_succeeded(
    rig: LocalRig, signum: signal.Signals
) -> None:
    agent = rig.start_other("agent", "--standalone", "work.py")
    until(lambda: rig.workers(), "the worker")
    agent.send_signal(signum)
    said = agent.communicate(timeout=PATIENCE_SECONDS)[0]
    assert agent.returncode == 130, said
    assert f" left ({signum.name})" in said


def test_suspended_local_job_ends_and_is_not_collected_as_finished(rig: LocalRig) -> None:
    runner = rig.start(rig.manifest(nodes=1), "--plain")
    rig.running(1)
    assert "job is running" in rig.call("resume", "job").stderr.replace('"', "")
    done = rig.call("suspend", "job")
    assert (done.returncode, done.stdout) == (0, "elasticjob.elasticjob.dev/job suspended\n")
    runner.communicate(timeout=PATIENCE_SECONDS)
    assert runner.returncode == 130
    assert rig.status()["phase"] == "Suspended"
    resumed = rig.call("resume", "job")
    assert resumed.returncode == 2
    assert "is resumed with `elasticjob run` in a terminal (it ran " in resumed.stderr
    last = rig.call("logs", "job", "--tail", "1", "--pod", "job-0")
    assert len(last.stdout.splitlines()) == 1
    assert "pods with output: job-0" in rig.call("logs", "job", "--pod", "x").stderr
    assert "none is finished" in rig.call("delete", "--finished").stdout
    assert "deleted" in rig.call("delete", "--all").stdout
    assert not rig.object()
    rig.nothing_left()
