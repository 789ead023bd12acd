"""Launcher with agents that attach, detach, are killed and return."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elasticjob_agent.runtimes.launcher_channel import Attach
from elasticjob_agent.runtimes.launcher_client import LauncherClient
from elasticjob_agent.worker_runtime import (
    Hello,
    LauncherSignalled,
    Prepared,
    PrepareWorkers,
    Started,
    Stopped,
    WorkerExited,
    WorkerRuntimeError,
    WorkerRuntimeLost,
)
from elasticjob_launcher.watchdog import SILENT_SECONDS
from tests.integration.launcher_rig import (
    JOB_KEY,
    PATIENCE_SECONDS,
    AgentProcess,
    SilentAgent,
    StartLauncher,
    alive,
    attached,
    exits,
    few_descriptors,
    launcher_file,
    process_tag,
    python,
    reaped,
    soon,
    start_launcher,
    start_workers,
    until,
    wait_for_end,
)

__all__ = ["launcher_file", "process_tag", "start_launcher"]

SLEEPER = ("sleep", "100")
IGNORES_SIGTERM = python(
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('ready', flush=True); time.sleep(100)"
)


def interpreters() -> list[str]:
    """Return this Python, and every other installed one from 3.8 on."""
    found = {os.path.realpath(sys.executable)}
    for version in range(8, 16):
        roots = [
            *os.get_exec_path(),
            *map(str, Path.home().glob(f".pyenv/versions/3.{version}.*/bin")),
        ]
        paths = (Path(root, f"python3.{version}") for root in roots if "shims" not in root)
        found |= {os.path.realpath(path) for path in paths if path.exists()}
    return sorted(found)


@pytest.mark.parametrize("interpreter", interpreters())
def test_round_runs_from_hello_to_release(start_launcher: StartLauncher, interpreter: str) -> None:
    async def scenario() -> None:
        launcher = start_launcher(interpreter=interpreter)
        runtime, events, hello = await attached(launcher)
        assert hello.argv == ("train", "--lr=1")
        assert hello.pid == launcher.process.pid
        assert os.path.realpath(hello.python) == interpreter
        assert (hello.cwd, hello.running, hello.pids) == (str(Path.cwd()), None, {})
        assert hello.probe_port > 0
        assert "PATH" in hello.env_names
        assert "ELASTICJOB_SOCKET" not in hello.env_names

        show = "import os, sys; print(os.environ['RANK'], sys.stdin.read()); sys.exit(5)"
        await runtime.start(start_workers(3, python(show), SLEEPER, RANK="7"))
        started = await until(events, Started, round=3)
        first = await until(events, WorkerExited, local_rank=0)
        assert (first.pid, first.exit_code, first.signal) == (started.pids[0], 5, None)
        assert abs(first.at_unix_ms / 1000 - time.time()) < PATIENCE_SECONDS
        await runtime.stop(3, 0)
        second = await until(events, WorkerExited, local_rank=1)
        assert (second.exit_code, second.signal) == (None, signal.SIGKILL)
        await until(events, Stopped, round=3)

        await runtime.release(17, "Succeeded: all is well")
        assert [event async for event in events] == []  # a requested end is no loss
        assert launcher.wait() == 17
        assert launcher.stdout.read_text() == "[0] 7 \n"
        assert launcher.stderr.read_text() == "[elasticjob] Succeeded: all is well\n"
        assert launcher.termination_log.read_text() == "Succeeded: all is well"
        assert not Path(launcher.socket).exists()

    asyncio.run(scenario())


def test_workers_survive_killed_agent_and_next_agent_adopts_them(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    steps = tmp_path / "steps"
    counts = python(
        f"import time\nwhile True:\n open({str(steps)!r}, 'a').write('x')\n time.sleep(.01)"
    )

    async def scenario() -> None:
        launcher = start_launcher()
        agent = AgentProcess.of(launcher, counts, ("sh", "-c", "sleep .3; exit 4"))
        pids = agent.worker_pids
        agent.kill()
        await soon(lambda: reaped(pids[1]))
        before = steps.stat().st_size

        runtime, events, hello = await attached(launcher)
        assert hello.running == 1
        assert hello.pids == {0: pids[0]}
        (missed,) = hello.exits
        assert (missed.round, missed.local_rank, missed.pid) == (1, 1, pids[1])
        assert missed.exit_code == 4
        await soon(lambda: steps.stat().st_size > before)
        await runtime.stop(1, 0)
        assert (await until(events, WorkerExited)).pid == pids[0]
        await until(events, Stopped, round=1)
        await runtime.aclose()

    asyncio.run(scenario())


def test_round_that_ended_without_agent_is_reported(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        agent = AgentProcess.of(launcher, ("sh", "-c", "sleep .2; exit 3"))
        agent.kill()
        await soon(lambda: reaped(agent.worker_pids[0]))
        runtime, _, hello = await attached(launcher)
        assert (hello.running, hello.pids) == (None, {})
        assert [(e.round, e.exit_code) for e in hello.exits] == [(1, 3)]
        await runtime.aclose()

    asyncio.run(scenario())


def test_workers_without_agent_are_killed_after_orphan_time(
    start_launcher: StartLauncher,
) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        agent = AgentProcess.of(launcher, SLEEPER, orphan_seconds=0.3)
        killed = time.monotonic()
        agent.kill()
        await soon(lambda: reaped(agent.worker_pids[0]))
        assert time.monotonic() - killed >= 0.25
        runtime, _, hello = await attached(launcher)
        assert [e.signal for e in hello.exits] == [signal.SIGKILL]
        assert "killing the workers of round 1" in launcher.stderr.read_text()
        await runtime.aclose()

    asyncio.run(scenario())


def test_agent_that_returns_in_time_keeps_workers(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        agent = AgentProcess.of(launcher, SLEEPER, orphan_seconds=8.0)
        agent.kill()
        runtime, events, hello = await attached(launcher, orphan_seconds=8.0)
        following = asyncio.ensure_future(anext(events))
        done, _ = await asyncio.wait({following}, timeout=8.5)
        assert not done  # past the orphan time, and nothing happened
        assert alive(hello.pids[0])
        await runtime.stop(1, 0)
        assert isinstance(await following, WorkerExited)
        await runtime.aclose()

    asyncio.run(scenario())


def test_killed_launcher_ends_its_workers(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        runtime, events, _ = await attached(launcher)
        await runtime.start(start_workers(1, SLEEPER, IGNORES_SIGTERM))
        started = await until(events, Started)
        launcher.process.kill()
        await until(events, WorkerRuntimeLost)
        wait_for_end(list(started.pids.values()))
        with pytest.raises(WorkerRuntimeError, match="not connected"):
            await runtime.stop(1, 0)

    asyncio.run(scenario())


def test_sigterm_is_forwarded_to_attached_agent(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        runtime, events, _ = await attached(launcher)
        await runtime.start(start_workers(1, SLEEPER))
        started = await until(events, Started)
        launcher.process.terminate()
        assert (await until(events, LauncherSignalled)).signum == signal.SIGTERM
        assert alive(started.pids[0])

        second, second_events, hello = await attached(launcher, session="s2")
        assert hello.pids == started.pids
        await until(second_events, LauncherSignalled)  # repeated to each new agent
        await second.aclose()  # without any agent the launcher ends by itself
        assert launcher.wait() == 128 + signal.SIGTERM
        assert not alive(started.pids[0])

    asyncio.run(scenario())


@pytest.mark.parametrize("worker", [SLEEPER, IGNORES_SIGTERM], ids=["obeys", "ignores"])
def test_sigterm_without_agent_ends_workers_and_launcher(
    start_launcher: StartLauncher, worker: tuple[str, ...]
) -> None:
    async def scenario() -> None:
        launcher = start_launcher(ELASTICJOB_STOP_GRACE_SECONDS="0.4")
        agent = AgentProcess.of(launcher, worker)
        if worker is IGNORES_SIGTERM:
            await soon(lambda: "ready" in launcher.stdout.read_text())
        agent.kill()
        launcher.process.terminate()
        assert launcher.wait() == 128 + signal.SIGTERM
        assert not alive(agent.worker_pids[0])

    asyncio.run(scenario())


@pytest.mark.parametrize("hangs", ["before", "after"])
def test_sigterm_beside_hung_agent_ends_workers_in_order(
    start_launcher: StartLauncher, tmp_path: Path, hangs: str
) -> None:
    handles = python(
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(9));"
        "open(sys.argv[1], 'w'); time.sleep(100)"
    )

    async def scenario() -> None:
        launcher = start_launcher(ELASTICJOB_STOP_GRACE_SECONDS="60")
        agent = await SilentAgent.attached(launcher, "s1")
        agent.start(1, *handles, str(tmp_path / "ready"))
        await soon((tmp_path / "ready").exists)
        if hangs == "before":
            await asyncio.sleep(SILENT_SECONDS)  # the silence itself
        else:
            agent.say(type="beat")
        launcher.process.terminate()
        assert (await agent.hears("worker_exited"))["exit_code"] == 9
        agent.close()
        assert launcher.wait() == 128 + signal.SIGTERM

    asyncio.run(scenario())


def test_sigterm_before_first_agent_ends_launcher(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        await soon(Path(launcher.socket).is_socket)
        launcher.process.terminate()
        assert launcher.wait() == 128 + signal.SIGTERM

    asyncio.run(scenario())


def test_newer_agent_replaces_attached_agent(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        _, old_events, _ = await attached(launcher, session="old")
        new, new_events, _ = await attached(launcher, session="new")
        assert "session new" in (await until(old_events, WorkerRuntimeLost)).reason
        await new.start(start_workers(1, ("true",)))
        assert (await exits(new_events, 1))[0].exit_code == 0
        await new.aclose()

    asyncio.run(scenario())


def test_agent_of_another_member_is_refused(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        own, own_events, _ = await attached(launcher)
        stranger = LauncherClient(launcher.socket, Attach("pod-9", "s", JOB_KEY))
        gone = await until(stranger.events(), WorkerRuntimeLost)
        assert "belongs to member 'pod-0'" in gone.reason
        await own.start(start_workers(1, ("true",)))
        await until(own_events, Stopped)
        await own.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"\xff\x00garbage\n", b"not a JSON line"),
        (b"[1]\n", b"must be a JSON object"),
        (b'{"type":"stop","round":1,"grace_seconds":0}\n', b"must be `attach`"),
        (b'{"type":"dance"}\n', b"unknown message type"),
        (b'{"type":"attach","member":3}\n', b"must be"),
    ],
)
def test_invalid_message_is_answered_with_error(
    start_launcher: StartLauncher, line: bytes, complaint: bytes
) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        runtime, events, _ = await attached(launcher)
        reader, writer = await asyncio.open_unix_connection(launcher.socket)
        writer.write(line)
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert complaint in await reader.read()
        writer.close()
        await runtime.start(start_workers(1, ("true",)))  # the agent's connection is unharmed
        await until(events, Stopped)
        await runtime.aclose()

    asyncio.run(scenario())


def test_client_waits_for_later_launcher(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        early = start_launcher()
        await soon(Path(early.socket).is_socket)
        early.process.kill()  # leaves a dead socket behind
        early.wait()
        runtime = early.runtime()
        first = asyncio.ensure_future(until(runtime.events(), Hello))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(first), 0.2)
        late = start_launcher(ELASTICJOB_SOCKET=early.socket)
        assert (await first).pid == late.process.pid
        assert stat.S_IMODE(Path(early.socket).stat().st_mode) == 0o666
        await runtime.aclose()

    asyncio.run(scenario())


def test_broken_connection_to_live_launcher_is_restored(
    start_launcher: StartLauncher,
) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        path = str(launcher.directory / "relay.sock")
        relayed: list[asyncio.StreamWriter] = []

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            onward = await asyncio.open_unix_connection(launcher.socket)
            relayed.extend((writer, onward[1]))
            await asyncio.gather(_copy(reader, onward[1]), _copy(onward[0], writer))

        server = await asyncio.start_unix_server(relay, path)
        await soon(Path(launcher.socket).is_socket)
        runtime = LauncherClient(path, Attach("pod-0", "s", JOB_KEY))
        events = runtime.events()
        await until(events, Hello)
        await runtime.start(start_workers(1, SLEEPER))
        started = await until(events, Started)
        for writer in relayed:
            writer.close()
        again = await until(events, Hello)
        assert (again.running, again.pids) == (1, started.pids)
        await runtime.stop(1, 0)
        await until(events, Stopped, round=1)
        await runtime.aclose()
        server.close()
        await server.wait_closed()
        for writer in relayed:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    asyncio.run(scenario())


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()


def test_launcher_without_descriptors_reports_failed_starts_and_survives(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    async def scenario() -> None:
        launcher = start_launcher()
        (tmp_path / "train.py").write_text("")
        worker = (sys.executable, str(tmp_path / "train.py"))
        runtime, events, _ = await attached(launcher)
        more = few_descriptors(launcher.process.pid)
        await runtime.prepare(PrepareWorkers(worker, {}, (), ""))
        assert "Too many open files" in (await until(events, Prepared, ready=False)).reason
        await runtime.start(start_workers(1, worker))
        assert "Too many open files" in (await until(events, WorkerExited)).message
        more()
        await until(events, Stopped)
        await runtime.start(start_workers(2, worker))
        assert (await until(events, WorkerExited)).exit_code == 0
        await runtime.aclose()

    asyncio.run(scenario())


FAILING = [
    ("def load():\n    raise ValueError('shard 3 is empty')\n\nload()\n", "shard 3 is empty"),
    ("def load(:\n    pass\n", "invalid syntax"),  # raised while the launcher compiles the program
]


@pytest.mark.parametrize(("source", "error"), FAILING, ids=["raised", "syntax"])
def test_traceback_of_forked_worker_has_no_frames_of_zip_file(
    start_launcher: StartLauncher, tmp_path: Path, source: str, error: str
) -> None:
    """The zip file contains bytecode, whose paths are not those of the file."""
    (tmp_path / "train.py").write_text(source)
    worker = (sys.executable, str(tmp_path / "train.py"))
    alone = subprocess.run(worker, capture_output=True, text=True, check=False).stderr
    assert error in alone

    async def scenario() -> None:
        launcher = start_launcher(command=worker)
        runtime, events, _ = await attached(launcher)
        await runtime.prepare(PrepareWorkers(worker, {}, (), ""))
        await until(events, Prepared, ready=True)
        await runtime.start(start_workers(1, worker))
        assert (await until(events, Started)).warm
        assert (await until(events, WorkerExited)).exit_code == 1
        await until(events, Stopped)
        await runtime.release(1, "over")
        launcher.wait()
        said = launcher.stderr.read_text().splitlines()
        lines = [line[len("[0] ") :] for line in said if line.startswith("[0] ")]
        assert lines == alone.splitlines()

    asyncio.run(scenario())


def test_second_launcher_on_same_socket_is_refused(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        first = start_launcher()
        await soon(Path(first.socket).is_socket)
        second = start_launcher(ELASTICJOB_SOCKET=first.socket)
        assert second.wait() == 2
        assert "another launcher listens" in second.stderr.read_text()

    asyncio.run(scenario())


def test_launcher_ends_with_lifeline_process(start_launcher: StartLauncher) -> None:
    async def scenario() -> None:
        parent = await asyncio.create_subprocess_exec("sleep", "100")
        launcher = start_launcher(ELASTICJOB_LIFELINE_PID=str(parent.pid))
        runtime, events, _ = await attached(launcher)
        await runtime.start(start_workers(1, IGNORES_SIGTERM))
        started = await until(events, Started)
        parent.kill()
        await parent.wait()
        await until(events, WorkerRuntimeLost)
        assert launcher.wait() == 1
        assert not alive(started.pids[0])

    asyncio.run(scenario())


@pytest.mark.parametrize(("workers", "notes"), [("1", 0), ("2", 1)])
def test_cleared_environment_is_reported_once_there_are_several_workers(
    start_launcher: StartLauncher, workers: str, notes: int
) -> None:
    launcher = start_launcher(command=("env", "-i", sys.executable, "train.py"))

    async def scenario() -> None:
        runtime, events, _ = await attached(launcher)
        for number in (1, 2):
            await runtime.start(start_workers(number, python("pass"), WORLD_SIZE=workers))
            await until(events, Stopped, round=number)
        await runtime.aclose()

    asyncio.run(scenario())
    assert launcher.stderr.read_text().count("env -i keeps the variables") == notes
