"""Command of a node in a real launcher, with a small program in place of torchrun.

The program starts two sleeping workers for each round and obeys files in its folder.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from elasticjob_agent.runtimes.launcher_channel import NodeEnding
from elasticjob_agent.runtimes.launcher_client import LauncherClient
from elasticjob_agent.worker_runtime import (
    Hello,
    NodeCommand,
    Started,
    StartWorkers,
    Stopped,
    WorkerExited,
    WorkerStart,
)
from elasticjob_launcher.settings import torchrun_socket
from elasticjob_launcher.worker_count import usable_cpus
from tests.integration.launcher_rig import (
    PATIENCE_SECONDS,
    LauncherProcess,
    StartLauncher,
    alive,
    launcher_file,
    process_tag,
    soon,
    start_launcher,
    until,
    wait_for_end,
)

__all__ = ["launcher_file", "process_tag", "start_launcher"]

SDK = str(Path(__file__).parents[3] / "sdk")
COMMAND = NodeCommand({"PET_NPROC_PER_NODE": "2"}, "", 0)
TORCHRUN = """
import os, pathlib, subprocess, sys, time
from elasticjob_torchrun.link import Link, LinkRefused
folder = pathlib.Path(sys.argv[1])
link = Link(os.environ["ELASTICJOB_TORCHRUN"])
while True:
    link.forget_round()
    link.send(type="join", workers=2, role="default")
    try:
        number = link.next_round()["round"]
    except LinkRefused as error:
        sys.exit(str(error))
    env = {**os.environ, "ELASTICJOB_ROUND": str(number)}
    sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(1000)"]
    if (folder / "worker.py").exists():
        sleep = [sys.executable, folder / "worker.py", folder / "made"]
    workers = [subprocess.Popen(sleep, env=env, start_new_session=True) for _ in range(2)]
    link.send(type="running", round=number, pids={n: w.pid for n, w in enumerate(workers)})
    while True:
        time.sleep(0.01)
        if (folder / "crash").exists():
            os._exit(9)
        if (folder / "succeed").exists():
            link.send(type="bye", succeeded=True)
            sys.exit(0)
        dead = [n for n, worker in enumerate(workers) if worker.poll() is not None]
        for n in dead:
            code = workers[n].returncode
            link.send(type="exited", round=number, local_rank=n, pid=workers[n].pid,
                      exit_code=None, signal=-code)
        if (dead or link.stops(number)) and not (folder / "hang").exists():
            break
    for worker in workers:
        worker.kill()
        worker.wait()
"""


def launched(start: StartLauncher, folder: Path, line: str = "TORCHRUN") -> LauncherProcess:
    program = folder / "torchrun.py"
    program.write_text(TORCHRUN)
    line = line.replace("TORCHRUN", f"{sys.executable} {program} {folder}")
    path = f"{SDK}:{os.environ.get('PYTHONPATH', '')}"
    return start(command=("bash", "-c", f"echo prepared; {line}"), PYTHONPATH=path)


def round_order(number: int, workers: int = 2, nodes: int = 2) -> StartWorkers:
    env = {"LOCAL_WORLD_SIZE": str(workers), "WORLD_SIZE": str(workers * nodes)}
    return StartWorkers(
        number,
        tuple(WorkerStart(rank, ("-",), env, "", "") for rank in range(workers)),
        0,
    )


async def workers_of(runtime: LauncherClient) -> int | None:
    """Return the number of workers of the command; a client waits for a launcher without limit."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await runtime.node_workers()


async def joined(launcher: LauncherProcess, orphan_seconds: float = 30.0):
    runtime = launcher.runtime(orphan_seconds=orphan_seconds, command=COMMAND)
    workers = await workers_of(runtime)
    events = runtime.events()
    hello = await until(events, Hello)
    return runtime, events, hello, workers


@pytest.mark.parametrize(("own", "notes"), [("1", 0), ("2", 1)])
def test_cleared_environment_is_reported_by_the_container_s_number_of_workers(
    start_launcher: StartLauncher, own: str, notes: int
) -> None:
    async def scenario() -> None:
        launcher = start_launcher(
            command=("env", "-i", sys.executable, "train.py"), PET_NPROC_PER_NODE=own
        )
        env = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "3" if own == "1" else "1"}
        runtime = launcher.runtime(command=NodeCommand(env, "", 0))
        await workers_of(runtime)
        await runtime.aclose()
        assert launcher.stderr.read_text().count("env -i keeps the variables") == notes

    asyncio.run(scenario())


def test_values_of_the_container_take_precedence(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    async def scenario() -> None:
        defaults = {"NPROC_PER_NODE": "2", "FORCE_TORCHRUN": "1", "PET_NPROC_PER_NODE": "2"}
        line = 'echo "$NPROC_PER_NODE $FORCE_TORCHRUN $PET_NPROC_PER_NODE" > "$FOLDER/seen"'
        launcher = start_launcher(
            command=("bash", "-c", line),
            FOLDER=str(tmp_path),
            NPROC_PER_NODE="4",
            FORCE_TORCHRUN="0",
        )
        runtime = launcher.runtime(orphan_seconds=30.0, command=NodeCommand(defaults, "", 0))
        await workers_of(runtime)
        assert (tmp_path / "seen").read_text().split() == ["4", "0", "2"]
        await runtime.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ({}, ""),
        ({"PROGRAM": "llamafactory-cli"}, "1"),  # this machine has no accelerators
        ({"PET_NPROC_PER_NODE": "cpu"}, str(usable_cpus())),
        ({"PET_NPROC_PER_NODE": "auto"}, str(usable_cpus())),
        ({"PET_NPROC_PER_NODE": "gpu"}, ""),
        ({"PET_NPROC_PER_NODE": "3"}, "3"),
        ({"PET_NPROC_PER_NODE": "\u00b2"}, ""),
        ({"PET_NPROC_PER_NODE": "cpu", "NPROC_PER_NODE": "5"}, "5"),
    ],
    ids=str,
)
def test_frameworks_get_the_number_of_workers(
    start_launcher: StartLauncher, tmp_path: Path, env: dict[str, str], seen: str
) -> None:
    async def scenario() -> None:
        line = 'echo "$NPROC_PER_NODE" > "$FOLDER/seen"'
        hidden = {"CUDA_VISIBLE_DEVICES": "", "FOLDER": str(tmp_path)}
        program = env.get("PROGRAM", "sh")
        launcher = start_launcher(command=("bash", "-c", line, program), **hidden)
        runtime = launcher.runtime(command=NodeCommand(env, "", 0))
        await workers_of(runtime)
        assert (tmp_path / "seen").read_text().strip() == seen
        await runtime.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize(("nproc", "seen"), [("cpu", "cpu"), ("npu", "npu"), ("8/2", "4")])
def test_python_program_that_starts_torchrun_runs_once_for_the_node(
    start_launcher: StartLauncher, tmp_path: Path, nproc: str, seen: str
) -> None:
    async def scenario() -> None:
        (tmp_path / "torchrun.py").write_text(TORCHRUN)
        program = tmp_path / "run_all.py"
        program.write_text(
            "import os, subprocess, sys\n"
            f"open({str(tmp_path / 'seen')!r}, 'a').write(os.environ['PET_NPROC_PER_NODE'] + ' ')\n"
            f"subprocess.run([sys.executable, {str(tmp_path / 'torchrun.py')!r}, "
            f"{str(tmp_path)!r}])\nsubprocess.run(['torchrun', 'gang.py'])\n"
        )
        path = f"{SDK}:{os.environ.get('PYTHONPATH', '')}"
        launcher = start_launcher(
            arguments=["--check", "--", sys.executable, str(program)],
            PYTHONPATH=path,
            ELASTICJOB_NPROC=nproc,
        )
        runtime = launcher.runtime(command=NodeCommand({}, "", 0), per_node=False)
        assert await workers_of(runtime) == 2
        events = runtime.events()
        hello = await until(events, Hello)
        assert hello.node_launch.endswith("starts torchrun")
        assert not hello.warms
        await runtime.start(round_order(1))
        started = await until(events, Started, round=1)
        await runtime.aclose()
        after = launcher.runtime(command=NodeCommand({}, "", 0), per_node=False)
        assert await workers_of(after) == 2
        adopted = await until(after.events(), Hello)
        assert (adopted.running, adopted.pids) == (1, started.pids)
        assert (tmp_path / "seen").read_text().split() == [seen]
        await after.aclose()

    asyncio.run(scenario())


def test_round_is_answered_stopped_and_followed_by_another(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    async def scenario() -> None:
        launcher = launched(start_launcher, tmp_path)
        runtime, events, hello, workers = await joined(launcher)
        assert workers == 2
        assert hello.running is None
        assert not hello.warms
        await runtime.start(round_order(1))
        first = await until(events, Started, round=1)
        assert len(first.pids) == 2
        assert "PerNode" in first.cold_reason
        await runtime.stop(1, 5.0)
        await until(events, Stopped, round=1)
        assert not any(alive(pid) for pid in first.pids.values())
        await runtime.start(round_order(2))
        second = await until(events, Started, round=2)
        assert all(alive(pid) for pid in second.pids.values())
        await runtime.release(0, "")
        assert launcher.wait() == 0
        wait_for_end(list(second.pids.values()))
        assert launcher.stdout.read_text().count("prepared") == 1

    asyncio.run(scenario())


SHARED_MEMORY = """
import os, pathlib, sys, time
from multiprocessing import shared_memory
name = shared_memory.SharedMemory(create=True, size=8).name
pathlib.Path(sys.argv[1] + name).touch()
time.sleep(1000)
"""


def test_shared_memory_of_killed_workers_is_removed(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    """By the tracker of multiprocessing, which outlives its worker for that."""
    (tmp_path / "worker.py").write_text(SHARED_MEMORY)

    async def scenario() -> None:
        runtime, events, _, _ = await joined(launched(start_launcher, tmp_path))
        await runtime.start(round_order(1))
        await soon(lambda: len([*tmp_path.glob("madepsm*")]) == 2)
        await runtime.stop(1, 0)
        await until(events, Stopped, round=1)
        await runtime.aclose()

    asyncio.run(scenario())
    names = [path.name[len("made") :] for path in tmp_path.glob("madepsm*")]
    left = [name for name in names if (Path("/dev/shm") / name).exists()]
    for name in left:
        (Path("/dev/shm") / name).unlink()
    assert not left


def test_killed_worker_is_reported_with_its_signal(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    async def scenario() -> None:
        launcher = launched(start_launcher, tmp_path)
        runtime, events, _, _ = await joined(launcher)
        await runtime.start(round_order(1))
        started = await until(events, Started, round=1)
        os.kill(started.pids[1], 9)
        exited = await until(events, WorkerExited)
        assert (exited.local_rank, exited.signal, exited.exit_code) == (1, 9, None)
        await until(events, Stopped, round=1)
        assert not alive(started.pids[0])
        await runtime.aclose()

    asyncio.run(scenario())


def test_torchrun_that_does_not_return_is_killed_and_the_command_runs_again(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    async def scenario() -> None:
        launcher = launched(start_launcher, tmp_path)
        runtime, events, _, _ = await joined(launcher)
        await runtime.start(round_order(1))
        started = await until(events, Started, round=1)
        (tmp_path / "hang").touch()
        await runtime.stop(1, 0.0)
        await soon(lambda: not any(alive(pid) for pid in started.pids.values()))
        await until(events, Stopped, round=1)
        (tmp_path / "hang").unlink()
        await runtime.start(round_order(2))
        await until(events, Started, round=2)
        await soon(lambda: launcher.stdout.read_text().count("prepared") == 2)
        await runtime.aclose()

    asyncio.run(scenario())


def test_every_process_is_killed_when_no_agent_returns(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    async def scenario() -> None:
        launcher = launched(start_launcher, tmp_path)
        runtime, events, _, _ = await joined(launcher, orphan_seconds=0.3)
        await runtime.start(round_order(1))
        started = await until(events, Started, round=1)
        await runtime.aclose()
        wait_for_end(list(started.pids.values()))
        after, events, hello, workers = await joined(launcher)
        assert workers == 2, "the number stays known"
        if hello.running is not None:
            await until(events, Stopped, round=1)
        await after.start(round_order(2))
        await until(events, Started, round=2)
        await soon(lambda: launcher.stdout.read_text().count("prepared") == 2)
        await after.aclose()

    asyncio.run(scenario())


def test_next_agent_adopts_the_running_round(start_launcher: StartLauncher, tmp_path: Path) -> None:
    async def scenario() -> None:
        launcher = launched(start_launcher, tmp_path)
        runtime, events, _, _ = await joined(launcher)
        await runtime.start(round_order(3))
        started = await until(events, Started, round=3)
        await runtime.aclose()
        after, events, hello, workers = await joined(launcher)
        assert (workers, hello.running) == (2, 3)
        assert hello.pids == started.pids
        await after.stop(3, 1.0)
        await until(events, Stopped, round=3)
        await after.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize(("nodes", "code"), [(1, 0), (2, 1)])
def test_command_that_never_joins_succeeds_on_a_single_node_alone(
    start_launcher: StartLauncher, tmp_path: Path, nodes: int, code: int
) -> None:
    async def scenario() -> None:
        launcher = launched(start_launcher, tmp_path, "true")
        runtime, events, _, workers = await joined(launcher)
        assert workers == 1
        await runtime.start(round_order(1, nodes=nodes))
        exited = await until(events, WorkerExited)
        assert exited.exit_code == code
        assert ("without joining" in exited.message) is (nodes > 1)
        await until(events, Stopped, round=1)
        await runtime.aclose()

    asyncio.run(scenario())


def test_failed_preparation_is_reported_in_the_round_and_repeated_in_the_next(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    async def scenario() -> None:
        launcher = launched(start_launcher, tmp_path, "echo the reason >&2; exit 7")
        runtime, events, _, _ = await joined(launcher)
        for number in (1, 2):
            await runtime.start(round_order(number))
            exited = await until(events, WorkerExited, round=number)
            assert exited.exit_code == 7
            assert exited.stderr_tail == "the reason\n"
            await until(events, Stopped, round=number)
        await soon(lambda: launcher.stdout.read_text().count("prepared") == 2)
        await runtime.aclose()

    asyncio.run(scenario())


def test_success_counts_once_the_rest_of_the_command_succeeded(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    async def scenario() -> None:
        rest = f"while ! test -e {tmp_path}/rest; do sleep 0.02; done"
        launcher = launched(start_launcher, tmp_path, f"TORCHRUN; {rest}")
        runtime, events, _, _ = await joined(launcher)
        await runtime.start(round_order(1))
        await until(events, Started, round=1)
        (tmp_path / "succeed").touch()
        early = asyncio.create_task(until(events, WorkerExited))
        await asyncio.sleep(0.3)
        assert not early.done()
        (tmp_path / "rest").touch()
        assert {(await early).exit_code, (await until(events, WorkerExited)).exit_code} == {0}
        await until(events, Stopped, round=1)
        await runtime.aclose()

    asyncio.run(scenario())


def test_torchrun_that_ends_alone_is_a_failure_and_its_workers_are_killed(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    async def scenario() -> None:
        launcher = launched(start_launcher, tmp_path, "TORCHRUN || sleep 1000")
        runtime, events, _, _ = await joined(launcher)
        await runtime.start(round_order(1))
        started = await until(events, Started, round=1)
        (tmp_path / "crash").touch()
        exited = await until(events, WorkerExited, round=1)
        assert exited.exit_code == 1
        assert "torchrun ended" in exited.message
        await until(events, Stopped, round=1)
        assert not any(alive(pid) for pid in started.pids.values())
        await runtime.aclose()

    asyncio.run(scenario())


def test_another_number_of_workers_is_refused(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    async def scenario() -> None:
        launcher = launched(start_launcher, tmp_path)
        runtime, events, _, _ = await joined(launcher)
        await runtime.start(round_order(1, workers=3))
        exited = await until(events, WorkerExited, round=1)
        assert exited.exit_code == 1
        assert "number of workers is 3" in exited.stderr_tail
        await runtime.aclose()

    asyncio.run(scenario())


def test_launcher_told_to_end_before_the_command_joins_ends_it(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    async def scenario() -> None:
        launcher = launched(start_launcher, tmp_path, "sleep 1000")
        waiting = asyncio.create_task(launcher.runtime(command=COMMAND).node_workers())
        await soon(lambda: "prepared" in launcher.stdout.read_text())
        launcher.process.terminate()
        with pytest.raises(NodeEnding):
            await waiting
        assert launcher.wait() == 143

    asyncio.run(scenario())


def test_connection_without_the_token_is_refused(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    async def scenario() -> None:
        launcher = launched(start_launcher, tmp_path, "sleep 1000")
        waiting = asyncio.create_task(launcher.runtime(command=COMMAND).node_workers())
        await soon(lambda: "prepared" in launcher.stdout.read_text())
        for first in ({"type": "join", "workers": 2}, {"type": "hello", "token": "guessed"}):
            path = torchrun_socket(launcher.socket)
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(json.dumps(first).encode() + b"\n")
            assert "token" in json.loads(await reader.readline())["message"]
            assert await reader.readline() == b""
            writer.close()
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(scenario())
