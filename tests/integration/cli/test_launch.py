"""Launch of commands by `elasticjob run`, with real processes: preparation, setup, decisions."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.integration.local_rig import PATIENCE_SECONDS, LocalRig, rig, until

__all__ = ["rig"]


def count(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_preparation_runs_once_for_each_pod_and_warm_workers_start_in_its_state(
    rig: LocalRig,
) -> None:
    (rig.job / "env.sh").write_text("export GREETING=hello\n")
    (rig.job / "sub").mkdir()
    (rig.job / "sub" / "work.py").write_text(
        "import os, sys\nprint(os.environ['GREETING'], sys.argv[1], flush=True)\n"
        "os.chdir('..')\n" + (rig.job / "work.py").read_text()
    )
    line = "echo ran >> prepared; . ./env.sh && cd sub; N=two; exec python3 work.py $N"
    manifest = rig.manifest(
        command=["bash", "-euo", "pipefail", "-c", line],
        nprocPerNode=2,
        nodes=2,
        setup=["sh", "-c", "echo ran >> setup"],
    )
    runner = rig.start(manifest, "--plain", "--logs")
    first = rig.running(2)["rendezvous"]["round"]
    until(lambda: len(rig.workers()) == 4, "four workers")
    os.kill(rig.workers()[0], signal.SIGKILL)
    status = rig.running(2, after=first)
    assert status["launch"]["mode"] == "PerWorker"
    assert status["launch"]["reason"] == "PreparationSplit"
    started = until(
        lambda: [one["start"] for one in rig.status()["members"] if one.get("start")],
        "the starts of the workers",
    )
    assert started == ["warm"] * len(started)
    rig.finish()
    said = runner.communicate(timeout=PATIENCE_SECONDS)[0]
    assert runner.returncode == 0, said
    assert (count(rig.job / "prepared"), count(rig.job / "setup")) == (2, 2)
    assert said.count("hello two") == 8
    assert "launch PerWorker: the preparation is run once for each pod" in said
    rig.nothing_left()


def test_failed_preparation_is_repeated_in_new_pods_and_reported(rig: LocalRig) -> None:
    line = "echo ran >> prepared; echo no such wheel >&2; exit 7; exec python3 work.py"
    manifest = rig.manifest(command=["bash", "-c", line], nprocPerNode=2, nodes=1)
    ran = rig.call("run", manifest, "--plain")
    said = ran.stdout + ran.stderr
    assert ran.returncode == 1, said
    assert "exit code 7" in said
    assert "no such wheel" in said
    assert count(rig.job / "prepared") == 5
    rig.nothing_left()


def test_preparation_is_repeated_until_it_succeeds(rig: LocalRig) -> None:
    rig.finish()
    line = "echo ran >> prepared; test $(wc -l < prepared) -gt 1 && exec python3 work.py"
    manifest = rig.manifest(command=["bash", "-ec", line], nprocPerNode=2, nodes=1, maxNodes=1)
    ran = rig.call("run", manifest, "--plain")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert count(rig.job / "prepared") == 2
    rig.nothing_left()


def test_interruption_ends_a_long_setup(rig: LocalRig) -> None:
    manifest = rig.manifest(setup=["sh", "-c", "touch began; sleep 1000"], nodes=1)
    runner = rig.start(manifest, "--plain")
    until((rig.job / "began").exists, "the setup")
    runner.send_signal(signal.SIGINT)
    said = runner.communicate(timeout=PATIENCE_SECONDS)[0]
    assert runner.returncode == 130, said
    rig.nothing_left()


def test_setup_longer_than_the_pending_timeout_is_awaited(rig: LocalRig) -> None:
    rig.finish()
    manifest = rig.manifest(
        setup=["sh", "-c", "echo ran >> setup; sleep 3"],
        nodes=1,
        elasticity={"pendingTimeoutSeconds": 1},
    )
    ran = rig.call("run", manifest, "--plain")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert count(rig.job / "setup") == 1
    rig.nothing_left()


def test_program_that_is_a_shell_script_is_not_started_once_for_each_worker(rig: LocalRig) -> None:
    script = rig.job / "train"
    script.write_text("#!/bin/bash\necho ran >> ran\nexec python3 work.py\n")
    script.chmod(0o755)
    rig.finish()
    manifest = rig.manifest(command=["./train"], nprocPerNode=2, nodes=1, maxNodes=1)
    ran = rig.call("run", manifest, "--plain")
    said = ran.stdout + ran.stderr
    assert ran.returncode == 1, said
    assert "./train is a shell script, which may start the workers itself" in said
    assert count(rig.job / "ran") == 0
    manifest = rig.manifest(
        "other", command=["./train"], nprocPerNode=2, nodes=1, maxNodes=1, launch="PerWorker"
    )
    ran = rig.call("run", manifest, "--plain")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert count(rig.job / "ran") == 2
    rig.nothing_left()


def test_output_of_a_command_that_starts_the_workers_has_no_ranks(rig: LocalRig) -> None:
    (rig.job / "greet.py").write_text("print('greetings')\n")
    line = f"{sys.executable} -m torch.distributed.run --nproc-per-node 2 greet.py; echo all done"
    ran = rig.call("run", "--plain", "--name", "job", "--", "bash", "-c", line)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "no worker reported a training step; the output of job-0 ends: all done\n" in ran.stdout
    assert rig.call("logs", "job").stdout.count("greetings") == 2
    for options in ((), ("--follow",)):
        refused = rig.call("logs", "job", "--rank", "1", *options)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "the output has no ranks: the command runs once for each pod" in refused.stderr


@pytest.mark.parametrize("verb", ["run", "validate"])
@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["python3 work.py"], "write each word as an item of its own"),
        (["python3", "work.py", "&&", "true"], "because no shell reads the command"),
        (["bash", "-c", "python3 work.py | tee log"], "because of a pipeline"),
        (["deepspeed", "work.py"], "each of the nodes would train alone"),
    ],
)
def test_command_without_a_safe_launch_is_refused(
    rig: LocalRig, verb: str, command: list[str], said: str
) -> None:
    found = rig.call(verb, rig.manifest(command=command, nprocPerNode=2))
    assert found.returncode == 2
    assert said in found.stderr
    assert "spec.template.spec.containers[0].command" in found.stderr


def test_validate_prints_the_launch(rig: LocalRig) -> None:
    found = rig.call("validate", rig.manifest(command=["bash", "-c", "cd x; torchrun t.py"]))
    assert found.returncode == 0
    assert found.stdout.splitlines()[1] == (
        "  job: launch PerNode (LauncherFound): torchrun inside of bash starts the workers itself"
    )


STARTS_TORCHRUN = (
    "import subprocess, sys\n"
    "cmd = [sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node=2', 'gang.py']\n"
    "subprocess.run(cmd, check=True)\n"
)
GANG = (
    "import os\n"
    "with open('gang', 'a') as file:\n"
    "    file.write(f\"{os.environ['WORLD_SIZE']} {os.environ['TORCHELASTIC_RUN_ID']}\\n\")\n"
)


def test_script_that_starts_torchrun_runs_once_for_each_pod(rig: LocalRig) -> None:
    (rig.job / "run_all.py").write_text(STARTS_TORCHRUN)
    (rig.job / "gang.py").write_text(GANG)
    manifest = rig.manifest(
        command=["python3", "run_all.py"], nprocPerNode=2, nodes=2, minNodes=2, maxNodes=2
    )
    ran = rig.call("run", manifest, "--plain")
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    assert "launch PerNode: run_all.py, line 2 starts torchrun" in said
    gangs = (rig.job / "gang").read_text().splitlines()
    assert len(gangs) == 4
    assert set(gangs) == {gangs[0]}  # one run of both nodes
    assert gangs[0].startswith("4 ")
    launch = rig.status()["launch"]
    assert (launch["mode"], launch["reason"]) == ("PerNode", "LauncherFound")
    assert rig.call("validate", "--strict", manifest).returncode == 0  # the pods decide alike
    (rig.job / "run_all.py").write_text("import os\nos.system('deepspeed gang.py')\n")
    found = rig.call("validate", "--strict", manifest)
    assert found.returncode == 3
    assert "spec.launch: warning (ProgramStartsLauncher): run_all.py, line 2" in found.stderr
    until(lambda: not rig.processes(), "every process to be gone")  # torchrun keeps its logs


def test_script_behind_a_preparation_that_starts_torchrun_runs_once_for_each_pod(
    rig: LocalRig,
) -> None:
    (rig.job / "sub").mkdir()
    (rig.job / "sub" / "run_all.py").write_text(STARTS_TORCHRUN)
    (rig.job / "sub" / "gang.py").write_text(GANG)
    line = ["sh", "-c", "echo ran >> prepared; cd sub && exec python3 run_all.py"]
    manifest = rig.manifest(command=line, nprocPerNode=2, nodes=2, minNodes=2, maxNodes=2)
    ran = rig.call("run", manifest, "--plain", "--logs")
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    assert "the command is run once for the node: run_all.py, line 2 starts torchrun" in said
    gangs = (rig.job / "sub" / "gang").read_text().splitlines()
    assert gangs == [gangs[0]] * 4  # one run of both nodes
    assert gangs[0].startswith("4 ")
    assert count(rig.job / "prepared") == 2
    launch = rig.status()["launch"]
    assert (launch["mode"], launch["reason"]) == ("PerNode", "LauncherFound")
    assert launch["message"] == "run_all.py, line 2 starts torchrun"
    refused = rig.call("logs", "job", "--rank", "1")
    assert "the output has no ranks" in refused.stderr
    until(lambda: not rig.processes(), "every process to be gone")  # torchrun keeps its logs


def test_script_behind_a_preparation_that_spawns_its_workers_is_refused_for_several_nodes(
    rig: LocalRig,
) -> None:
    (rig.job / "sub").mkdir()
    (rig.job / "sub" / "run_all.py").write_text("import os\nos.system('deepspeed gang.py')\n")
    line = ["sh", "-c", "cd sub && exec python3 run_all.py"]
    manifest = rig.manifest(command=line, nprocPerNode=2, nodes=2, minNodes=2, maxNodes=2)
    ran = rig.call("run", manifest, "--plain")
    said = ran.stdout + ran.stderr
    assert ran.returncode == 1, said
    assert "run_all.py, line 2 starts deepspeed, which does not join the job's rendezvous" in said
    rig.nothing_left()


def test_script_that_spawns_workers_of_its_own_runs_on_one_node_only(rig: LocalRig) -> None:
    (rig.job / "spawn.py").write_text(
        "import os, torch.distributed as dist, torch.multiprocessing as mp\n"
        "def work(rank, n):\n"
        "    dist.init_process_group('gloo', init_method='file://' + os.path.abspath('store'), "
        "rank=rank, world_size=n)\n"
        "    dist.barrier()\n"
        "    open('gang', 'a').write(f'{rank}\\n')\n"
        "if __name__ == '__main__':\n"
        "    mp.spawn(work, args=(2,), nprocs=2)\n"
    )
    command = ["python3", "spawn.py"]
    several = rig.call("run", rig.manifest(command=command, nprocPerNode=2, nodes=2), "--plain")
    assert several.returncode == 2
    assert "spawn.py, line 7 starts torch.multiprocessing.spawn" in several.stderr
    assert "each of the nodes would train alone" in several.stderr
    one = rig.manifest("one", command=command, nprocPerNode=2, nodes=1, maxNodes=1)
    ran = rig.call("run", one, "--plain")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert sorted((rig.job / "gang").read_text().split()) == ["0", "1"]
    until(lambda: not rig.processes(), "every process to be gone")  # torchrun keeps its logs


SPAWNS_IF_ASKED = (
    "import os, torch.multiprocessing as mp\n"
    "def work(local):\n"
    "    with open('ran', 'a') as file:\n"
    "        file.write(f\"{os.environ['RANK']} {local}\\n\")\n"
    "if __name__ == '__main__':\n"
    "    nprocs = int(os.environ.get('NPROCS', '1'))\n"
    "    if nprocs > 1:\n"
    "        mp.spawn(work, nprocs=nprocs)\n"
    "    else:\n"
    "        work(0)\n"
)
SPAWN = (
    "from multiprocessing import get_context\n"
    "def spawn(function, nprocs):\n"
    "    processes = [get_context('spawn').Process(target=function, args=(local,)) "
    "for local in range(nprocs)]\n"
    "    for process in processes:\n"
    "        process.start()\n"
    "    for process in processes:\n"
    "        process.join()\n"
)
"""Function of torch.multiprocessing, without the import of torch in each process."""


def test_processes_that_a_script_spawns_if_asked_are_those_of_each_worker(rig: LocalRig) -> None:
    """A conditional launch is not reported: the script also runs well once for each worker. With
    the condition true each worker has processes of its own, and `spec.launch` decides."""
    (rig.job / "spawn.py").write_text(SPAWNS_IF_ASKED)
    package = rig.tmp.parent / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "multiprocessing.py").write_text(SPAWN)
    path = {"PYTHONPATH": os.pathsep.join([str(package.parent), rig.env["PYTHONPATH"]])}
    command = ["python3", "spawn.py"]
    manifest = rig.manifest(command=command, nprocPerNode=2, nodes=1, maxNodes=1)
    checked = rig.call("validate", "--strict", manifest)
    assert "launch PerWorker" in checked.stdout
    assert "ProgramStartsLauncher" not in checked.stdout + checked.stderr

    def ran(manifest: Path, environment: dict[str, str]) -> list[str]:
        (rig.job / "ran").unlink(missing_ok=True)
        done = rig.call("run", manifest, "--plain", env={**path, **environment})
        assert done.returncode == 0, done.stdout + done.stderr
        return sorted((rig.job / "ran").read_text().splitlines())

    assert ran(manifest, {}) == ["0 0", "1 0"]
    assert ran(manifest, {"NPROCS": "2"}) == ["0 0", "0 1", "1 0", "1 1"]
    until(lambda: not rig.processes(), "every process to be gone")


@pytest.mark.parametrize("in_process", [True, False])
def test_torchrun_inside_of_a_worker_fails_the_worker(rig: LocalRig, in_process: bool) -> None:
    (rig.job / "gang.py").write_text(GANG)
    start = (
        "importlib.import_module('torch.distributed.' + 'run').main(['gang.py'])\n"
        if in_process
        else "os.system(sys.executable + ' -m torch.distributed.' + chr(114) + 'un gang.py')\n"
    )
    (rig.job / "hidden.py").write_text(
        "import importlib, os, sys, time\n"
        "if os.environ['RANK'] == '0':\n    time.sleep(600)\n" + start
    )
    manifest = rig.manifest(
        command=["python3", "hidden.py"],
        nprocPerNode=2,
        nodes=1,
        maxNodes=1,
        maxRestarts=0,
    )
    ran = rig.call("run", manifest, "--plain")
    said = ran.stdout + ran.stderr
    assert ran.returncode == 1, said
    assert "torchrun was started by a worker (rank 1: python3 hidden.py)" in said
    assert "set spec.launch to PerNode" in said
    assert rig.status()["firstFailure"]["class"] == "UserError"
    assert not (rig.job / "gang").exists()
    until(lambda: not rig.processes(), "every process to be gone")  # torchrun keeps its logs


def test_option_launch_takes_precedence_over_the_command(rig: LocalRig) -> None:
    (rig.job / "say.py").write_text("print('said', flush=True)\n")
    for launch, count_of in (("PerNode", 1), ("PerWorker", 2)):
        options = ("--plain", "--logs", "--nproc-per-node", "2", "--launch", launch)
        ran = rig.call("run", *options, "say.py")
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert f"launch {launch}: spec.launch is {launch}" in ran.stdout + ran.stderr
        lines = [line for line in ran.stdout.splitlines() if line.startswith("say-0 ")]
        assert len([line for line in lines if line.endswith(" said")]) == count_of, ran.stdout
    wrong = rig.call("run", "--launch", "Sometimes", "say.py")
    assert wrong.returncode == 2
    written = rig.call("init", "say.py", "--launch", "PerNode", "-o", "-")
    assert "  launch: PerNode " in written.stdout


def test_rank_0_may_start_a_job_of_its_own(rig: LocalRig) -> None:
    (rig.job / "gang.py").write_text(GANG)
    (rig.job / "train.py").write_text(
        "import os, sys, subprocess\n"
        "if os.environ['RANK'] == '0':\n"
        "    subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--standalone', "
        "'gang.py'], check=True)\n"
    )
    manifest = rig.manifest(command=["python3", "train.py"], nprocPerNode=2, nodes=1, maxNodes=1)
    ran = rig.call("run", manifest, "--plain")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "launch PerWorker" in ran.stdout + ran.stderr
    assert (rig.job / "gang").read_text().startswith("1 ")
    until(lambda: not rig.processes(), "every process to be gone")  # torchrun keeps its logs
