"""Preparation and setup of a pod, in real shells: state for the workers, failures and signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elasticjob_agent.worker_runtime import Prepared, PrepareWorkers, Started
from elasticjob_operator.domain.manifests.trainer_command import LaunchSpec, trainer_command
from tests.integration.launcher_rig import (
    LauncherProcess,
    StartLauncher,
    attached,
    exits,
    launcher_file,
    process_tag,
    start_launcher,
    start_workers,
    tagged_processes,
    until,
)

__all__ = ["launcher_file", "process_tag", "start_launcher"]

SHELLS = [["bash", "-euo", "pipefail", "-c"], ["dash", "-ec"], ["bash", "--posix", "-c"]]
REPORTER = """
import json, os, resource, sys
mask = os.umask(0)
found = {
    "argv": sys.argv[1:], "cwd": os.getcwd(), "umask": mask, "env": dict(os.environ),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
}
with open(os.environ["OUT"] + "." + os.environ["LOCAL_RANK"], "w") as file:
    json.dump(found, file)
"""


def arguments(command: Sequence[str], setup: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the launcher's arguments in a pod with eight workers."""
    found = trainer_command(command, (), 8, LaunchSpec(setup=tuple(setup)))
    return (*found.command[2:], *found.args)


async def run_workers(
    launcher: LauncherProcess, out: Path, ranks: int = 2, warm: bool = False
) -> list[dict[str, Any]]:
    """Run the workers' command once for each rank; return their reports."""
    runtime, events, hello = await attached(launcher)
    if warm:
        await runtime.prepare(PrepareWorkers(hello.argv, {"OUT": str(out)}))
        assert (await until(events, Prepared)).ready
    for rank in range(ranks):
        command = start_workers(rank + 1, hello.argv, OUT=str(out), LOCAL_RANK=str(rank))
        await runtime.start(command)
        started = await until(events, Started)
        assert started.warm is warm, started.cold_reason
        ended = await exits(events, 1)
        assert ended[0].exit_code == 0, ended[0].stderr_tail
    await runtime.release(0, "")
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("shell", SHELLS, ids=lambda words: words[0] + words[1])
def test_workers_start_with_the_state_that_the_preparation_left(
    start_launcher: StartLauncher, tmp_path: Path, shell: list[str], warm: bool
) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    (tmp_path / "train.py").write_text(REPORTER)
    (tmp_path / "activate").write_text("VENV=/venv; export VENV; HIDDEN=yes\n")
    line = f"""
        # torchrun would be wrong here
        echo once >> '{tmp_path}/count'
        cd '{folder}' && . '{tmp_path}/activate' && export A='two
lines' EMPTY= ; umask 027; ulimit -n 200
        cat > note <<END
        python never.py && torchrun $VENV
END
        B="it's \\$5"; C=1 exec {sys.executable} '{tmp_path}/train.py' --b "$B" $HIDDEN "$A" '$B' *
        """
    launcher = start_launcher(arguments=arguments([*shell, line]))
    reports = asyncio.run(run_workers(launcher, tmp_path / "out", warm=warm))
    assert (tmp_path / "count").read_text() == "once\n"
    for rank, found in enumerate(reports):
        assert found["argv"] == ["--b", "it's $5", "yes", "two\nlines", "$B", "note"]
        assert (found["cwd"], found["umask"], found["files"]) == (str(folder), 0o027, 200)
        env = found["env"]
        assert (env["A"], env["EMPTY"], env["C"], env["VENV"]) == ("two\nlines", "", "1", "/venv")
        assert env["LOCAL_RANK"] == str(rank)
        assert "B" not in env
        assert "HIDDEN" not in env
        assert not [name for name in env if name.startswith("ELASTICJOB_PREPARE")]
    assert (folder / "note").read_text().strip() == "python never.py && torchrun /venv"


@pytest.mark.parametrize("shell", SHELLS, ids=lambda words: words[0] + words[1])
def test_variables_of_a_worker_are_expanded_for_each_worker(
    start_launcher: StartLauncher, tmp_path: Path, shell: list[str]
) -> None:
    (tmp_path / "train.py").write_text(REPORTER)
    line = (
        f"cd '{tmp_path}' && export LR='1 2' && "
        f'R=r$LOCAL_RANK {sys.executable} train.py --rank "$LOCAL_RANK" "$LR" > log.$LOCAL_RANK'
    )
    launcher = start_launcher(arguments=arguments([*shell, line]))
    reports = asyncio.run(run_workers(launcher, tmp_path / "out"))
    assert [found["argv"] for found in reports] == [
        ["--rank", "0", "1 2"],
        ["--rank", "1", "1 2"],
    ]
    assert [found["env"]["R"] for found in reports] == ["r0", "r1"]
    assert (tmp_path / "log.1").exists()


def test_values_in_other_encodings_reach_the_workers(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(REPORTER)
    line = f"export LC_ALL=C; X=$(printf 'caf\\351'); exec {sys.executable} train.py é \"$X\""
    launcher = start_launcher(arguments=arguments(["sh", "-c", f"cd '{tmp_path}'; {line}"]))
    (found,) = asyncio.run(run_workers(launcher, tmp_path / "out", ranks=1))
    assert [os.fsencode(word) for word in found["argv"]] == ["é".encode(), b"caf\xe9"]


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("cd /nowhere && python3 train.py", None, "/nowhere"),
        ("set -e; echo why >&2; false; python3 train.py", 1, "failed with exit code 1: why"),
        ("echo no >&2; exit 7; python3 train.py", 7, "failed with exit code 7: no"),
        ("sh -c 'kill -9 $PPID'; python3 train.py", 137, "was killed by SIGKILL"),
        ("test 1 = 1 && sh -c 'exit 3' && python3 train.py", 3, "failed with exit code 3"),
    ],
)
def test_failed_preparation_ends_the_launcher_with_its_reason(
    start_launcher: StartLauncher, line: str, code: int | None, said: str
) -> None:
    launcher = start_launcher(arguments=arguments(["bash", "-c", line]))
    ended = launcher.wait()
    assert ended == code if code is not None else ended in (1, 2)
    message = launcher.termination_log.read_text()
    assert message.startswith("the preparation ")
    assert said in message
    assert len(message) <= 4096
    assert "[elasticjob] the preparation " in launcher.stderr.read_text()


def test_preparation_that_does_not_reach_the_command_is_a_failure(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    script = tmp_path / "leave"
    script.write_text("exit 0\n")
    launcher = start_launcher(
        arguments=arguments(["bash", "-c", f". {script}; exec python3 train.py"])
    )
    assert launcher.wait() == 1
    assert "before the command of the workers" in launcher.termination_log.read_text()


def test_missing_shell_is_reported(start_launcher: StartLauncher) -> None:
    launcher = start_launcher(arguments=arguments(["/no/bash", "-c", "cd /; python3 train.py"]))
    assert launcher.wait() == 127
    assert "/no/bash" in launcher.termination_log.read_text()


@pytest.mark.parametrize("ignore", ["", "trap '' TERM; "], ids=["default", "ignored"])
def test_sigterm_ends_the_preparation_at_once(
    start_launcher: StartLauncher, tmp_path: Path, ignore: str
) -> None:
    setup = ["bash", "-c", f"{ignore}touch {tmp_path}/began; sleep 100 & sleep 100"]
    launcher = start_launcher(arguments=arguments(["python3", "train.py"], setup))
    deadline = time.monotonic() + 60
    while not (tmp_path / "began").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    at = time.monotonic()
    launcher.process.send_signal(signal.SIGTERM)
    assert launcher.wait() == 143
    assert time.monotonic() - at < 50, "its processes would sleep for 100 s"
    assert "was stopped by SIGTERM" in launcher.termination_log.read_text()
    assert tagged_processes(os.environ["ELASTICJOB_TEST_TAG"]) == []


def test_setup_runs_once_before_the_preparation_and_its_output_is_forwarded(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(REPORTER)
    setup = ["sh", "-c", f"echo setup >> {tmp_path}/order; echo out; echo err >&2; cd /"]
    line = f"echo preparation >> {tmp_path}/order; cd {tmp_path}; {sys.executable} train.py"
    launcher = start_launcher(arguments=arguments(["sh", "-c", line], setup))
    asyncio.run(run_workers(launcher, tmp_path / "out"))
    assert launcher.wait() == 0
    assert (tmp_path / "order").read_text() == "setup\npreparation\n"
    assert launcher.stdout.read_text() == "out\n"
    assert "err\n" in launcher.stderr.read_text()


def test_failed_setup_ends_the_launcher(start_launcher: StartLauncher) -> None:
    setup = ["sh", "-c", "echo no wheel >&2; exit 5"]
    launcher = start_launcher(arguments=arguments(["python3", "train.py"], setup))
    assert launcher.wait() == 5
    assert launcher.termination_log.read_text() == ("the setup failed with exit code 5: no wheel")
