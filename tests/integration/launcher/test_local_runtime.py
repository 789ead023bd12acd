"""Workers below the agent's own process: started, signalled, stopped, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from elasticjob_agent.runtimes.local import LocalRuntime
from elasticjob_agent.worker_runtime import (
    Hello,
    LogTrouble,
    Started,
    StartRefused,
    Stopped,
    WorkerExited,
    WorkerRuntimeError,
    WorkerRuntimeLost,
)
from tests.integration.launcher_rig import (
    AgentProcess,
    alive,
    exits,
    process_tag,
    python,
    reaped,
    soon,
    start_workers,
    tagged_processes,
    until,
    wait_for_end,
)

__all__ = ["process_tag"]

pytestmark = pytest.mark.usefixtures("process_tag")

SLEEPER = ("sleep", "100")
# Writes its own pid and that of a child in its group to the file, then sleeps.
WITH_CHILD = (
    "import os, signal, sys, time; path, how = sys.argv[1:]; child = os.fork();"
    "parent = os.getppid() if not child else os.getpid();"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN if how == 'ignore' else signal.SIG_DFL);"
    "os.setsid() if how == 'daemon' and not child else None;"
    "child or open(path + '.new', 'w').write(str(os.getpid())) and os.rename(path + '.new', path);"
    "time.sleep(0.2 if child and how in ('leave', 'daemon') else 100)"
)


def with_child(path: Path, how: str) -> tuple[str, ...]:
    return (*python(WITH_CHILD), str(path), how)


async def child_of(path: Path) -> int:
    await soon(path.exists)
    return int(path.read_text())


def run(scenario: Callable[[LocalRuntime, Any], Awaitable[None]]) -> None:
    """Run the scenario with a started runtime, which is closed in every case."""

    async def whole() -> None:
        runtime = LocalRuntime(("train",))
        events = runtime.events()
        try:
            assert (await until(events, Hello)).argv == ("train",)
            await scenario(runtime, events)
        finally:
            await runtime.aclose()

    asyncio.run(whole())


async def outcome(runtime: LocalRuntime, events: Any, *argv: str) -> WorkerExited:
    await runtime.start(start_workers(1, argv))
    exited = (await exits(events, 1))[0]
    await until(events, Stopped, round=1)
    return exited


def test_stop_sends_sigterm_then_sigkill_after_grace_period(tmp_path: Path) -> None:
    handles = python(
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(9));"
        "open(sys.argv[1], 'w'); time.sleep(100)"
    )

    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        ready, pid = tmp_path / "ready", tmp_path / "pid"
        await runtime.start(start_workers(1, with_child(pid, "ignore"), (*handles, str(ready))))
        await soon(lambda: ready.exists() and pid.exists())
        told = time.monotonic()
        await runtime.stop(1, 2.0)
        first = await until(events, WorkerExited)
        assert (first.local_rank, first.exit_code) == (1, 9)
        second = await until(events, WorkerExited)
        assert (second.local_rank, second.signal) == (0, signal.SIGKILL)
        assert time.monotonic() - told >= 1.95
        await until(events, Stopped, round=1)

    run(scenario)


def test_second_stop_can_only_shorten_grace_period(tmp_path: Path) -> None:
    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        await runtime.start(start_workers(1, with_child(tmp_path / "pid", "ignore")))
        await child_of(tmp_path / "pid")
        told = time.monotonic()
        await runtime.stop(1, 100)
        await runtime.stop(1, 0.3)
        await runtime.stop(1, 100)
        await until(events, Stopped, round=1)
        assert 0.25 <= time.monotonic() - told < 50, "not the grace period of 100 s"

        await runtime.start(start_workers(2, with_child(tmp_path / "pid2", "ignore")))
        await child_of(tmp_path / "pid2")
        told = time.monotonic()
        await runtime.stop(2, 100)
        await runtime.stop(2, 0)
        await until(events, Stopped, round=2)
        assert time.monotonic() - told < 50, "not the grace period of 100 s"

    run(scenario)


def test_stop_without_workers_is_answered() -> None:
    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        await runtime.stop(7, 0)
        await until(events, Stopped, round=7)
        await runtime.start(start_workers(8, SLEEPER))
        started = await until(events, Started)
        await runtime.stop(7, 0)
        await until(events, Stopped, round=7)
        assert alive(started.pids[0])

    run(scenario)


def test_grandchildren_end_with_process_group(tmp_path: Path) -> None:
    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        await runtime.start(start_workers(1, with_child(tmp_path / "pid", "ignore")))
        child = await child_of(tmp_path / "pid")
        await runtime.stop(1, 0)
        await until(events, Stopped, round=1)
        assert reaped(child)

    run(scenario)


WITH_SHARED_MEMORY = (
    "import os, sys, time; from multiprocessing import resource_tracker, shared_memory;"
    "name, path, daemon = sys.argv[1:];"
    "shared_memory.SharedMemory(name, create=True, size=8);"
    "pid = resource_tracker._resource_tracker._pid;"
    "child = os.fork() if daemon else -1;"
    "child or (os.setsid(), time.sleep(100));"
    "exec('while child > 0 and os.getsid(child) != child: time.sleep(0.01)');"
    "open(path + '.new', 'w').write(str(pid)); os.rename(path + '.new', path); time.sleep(100)"
)


@pytest.mark.parametrize("daemon", ["", "daemon"])
def test_shared_memory_of_killed_worker_is_removed_by_its_tracker(
    tmp_path: Path, daemon: str
) -> None:
    """The tracker does not end while a daemon has its pipe, and is killed then."""
    name = f"test_{uuid.uuid4().hex}"
    memory = Path("/dev/shm") / name

    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        command = (*python(WITH_SHARED_MEMORY), name, str(tmp_path / "tracker"), daemon)
        await runtime.start(start_workers(1, command))
        tracker = await child_of(tmp_path / "tracker")
        await runtime.stop(1, 0)
        await until(events, Stopped)
        assert not alive(tracker)

    run(scenario)
    is_left = memory.exists()
    memory.unlink(missing_ok=True)
    assert is_left is bool(daemon)


def test_round_stops_only_after_its_last_process_group(tmp_path: Path) -> None:
    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        await runtime.start(start_workers(1, with_child(tmp_path / "pid", "leave")))
        child = await child_of(tmp_path / "pid")
        assert (await exits(events, 1))[0].exit_code == 0
        assert alive(child)
        await runtime.start(start_workers(2, SLEEPER))
        refused = await until(events, StartRefused, round=2)
        assert "round 1 still has processes" in refused.message
        os.kill(child, signal.SIGKILL)
        await until(events, Stopped, round=1)
        await runtime.start(start_workers(2, ("true",)))
        await until(events, Stopped, round=2)

    run(scenario)


def test_unreaped_dead_worker_does_not_delay_next_round(tmp_path: Path) -> None:
    # A child outside the group, and its own child, which goes back into the group.
    source = (
        "import os, sys, time; leader = os.getpid(); middle = os.fork() or os.getpid()\n"
        "if os.getpid() == leader: time.sleep(100)\n"
        "os.setpgid(0, 0); child = os.fork()\n"
        "if not child: os.setpgid(0, leader); open(sys.argv[1], 'w').write(str(os.getpid()))\n"
        "time.sleep(100)"
    )

    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        path = tmp_path / "pid"
        await runtime.start(start_workers(1, (*python(source), str(path))))
        member = int(await soon(lambda: path.exists() and path.read_text()))
        await runtime.stop(1, 0)
        await until(events, Stopped, round=1)
        assert not alive(member)
        assert not reaped(member)

    run(scenario)


def test_daemon_survives_its_round_but_not_the_job(tmp_path: Path) -> None:
    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        await runtime.start(start_workers(1, with_child(tmp_path / "pid", "daemon")))
        child = await child_of(tmp_path / "pid")
        await until(events, Stopped, round=1)
        assert alive(child)
        await runtime.release(0, "")
        assert reaped(child)

    run(scenario)


def test_signal_reaches_whole_process_group() -> None:
    source = (
        "import signal, sys; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(8));"
        "sys.stderr.write('x'); signal.pause()"
    )

    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        await runtime.start(start_workers(1, python(source)))
        pid = (await until(events, Started)).pids[0]
        caught = f"SigCgt:\t{1 << (signal.SIGUSR1 - 1):016x}"
        await soon(lambda: int(caught[-16:], 16) & _caught_signals(pid))
        await runtime.signal(1, signal.SIGUSR1)
        assert (await exits(events, 1))[0].exit_code == 8

    run(scenario)


def _caught_signals(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))


def test_workers_have_own_sessions_and_empty_stdin() -> None:
    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        source = (
            "import os, sys; pid = os.getpid(); sys.stderr.write(repr(("
            "os.getsid(0) == os.getpgid(0) == pid, sys.stdin.read(),"
            "os.environ.get('ELASTICJOB_AGENT_FD'), len(os.listdir('/proc/self/fd')))))"
        )
        exited = await outcome(runtime, events, *python(source))
        assert exited.stderr_tail == "(True, '', None, 4)"

    run(scenario)


@pytest.mark.parametrize(
    ("name", "content", "mode", "exit_code", "words"),
    [
        ("", None, 0, 127, "no-such-trainer' was not found on PATH"),
        ("absent", None, 0, 127, "full path as the first item of `command`"),
        ("plain", b"#!/bin/sh\n", 0o644, 126, "is not executable: run `chmod +x`"),
        ("lost", b"#!/no/such/shell\n", 0o755, 127, "the interpreter named in its first line"),
        ("data", b"\x7fELF but not really", 0o755, 126, "is not a program for this machine"),
    ],
)
def test_failed_command_reports_cause_and_remedy(
    tmp_path: Path, name: str, content: bytes | None, mode: int, exit_code: int, words: str
) -> None:
    command = tmp_path / name if name else Path("no-such-trainer")
    if content is not None:
        command.write_bytes(content)
        command.chmod(mode)

    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        exited = await outcome(runtime, events, str(command))
        assert (exited.pid, exited.exit_code, exited.signal) == (0, exit_code, None)
        assert words in exited.message

    run(scenario)


def test_failed_start_does_not_stop_other_workers() -> None:
    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        await runtime.start(start_workers(1, SLEEPER, ("/no/such/file",)))
        started = await until(events, Started)
        assert set(started.pids) == {0}
        failed = await until(events, WorkerExited)
        assert (failed.local_rank, failed.exit_code) == (1, 127)
        assert alive(started.pids[0])

    run(scenario)


def test_last_output_of_failed_worker_is_reported() -> None:
    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        exited = await outcome(runtime, events, *python("import no_such_module"))
        assert exited.exit_code == 1
        assert exited.stderr_tail.endswith("No module named 'no_such_module'\n")

    run(scenario)


def test_killed_agent_ends_its_workers(tmp_path: Path) -> None:
    agent = AgentProcess("local_runtime()", SLEEPER, with_child(tmp_path / "pid", "ignore"))
    child = asyncio.run(child_of(tmp_path / "pid"))
    agent.kill()
    wait_for_end([*agent.worker_pids, child])


def test_hung_agent_loses_its_workers(tmp_path: Path) -> None:
    """Other members cannot probe the launcher below it, and rely on this end after a while."""
    runtime = "local_runtime(hung_agent_seconds=3.0)"
    agent = AgentProcess(runtime, SLEEPER, with_child(tmp_path / "pid", "ignore"))
    child = asyncio.run(child_of(tmp_path / "pid"))
    agent.process.send_signal(signal.SIGSTOP)
    wait_for_end([*agent.worker_pids, child])
    assert agent.process.poll() is None
    agent.kill()


def test_fork_of_killed_agent_does_not_keep_workers_alive(process_tag: str) -> None:
    # The fork keeps the agent's end of the connection open, so the agent's end alone goes
    # unnoticed.
    agent = AgentProcess("local_runtime()", SLEEPER, fork=True)
    agent.kill()
    wait_for_end(agent.worker_pids)
    (fork,) = [pid for pid in tagged_processes(process_tag) if b"asyncio" in cmdline(pid)]
    os.kill(fork, signal.SIGKILL)


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_killed_launcher_is_detected_and_ends_workers() -> None:
    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        await runtime.start(start_workers(1, SLEEPER))
        started = await until(events, Started)
        parent = int(
            Path(f"/proc/{started.pids[0]}/stat").read_text().rpartition(")")[2].split()[1]
        )
        os.kill(parent, signal.SIGKILL)
        assert "signal 9" in (await until(events, WorkerRuntimeLost)).reason
        wait_for_end(list(started.pids.values()))
        with pytest.raises(WorkerRuntimeError, match="does not run"):
            await runtime.stop(1, 0)

    run(scenario)


def test_close_kills_running_workers() -> None:
    pids: list[int] = []

    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        await runtime.start(start_workers(1, SLEEPER))
        pids.extend((await until(events, Started)).pids.values())

    run(scenario)
    assert [pid for pid in pids if not reaped(pid)] == []


def test_log_file_errors_are_reported_once_and_do_not_block(tmp_path: Path) -> None:
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
        (tmp_path / rank / "stdout.log").symlink_to("/dev/full")  # every write: no space left

    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        talks = python("for i in range(20000): print(i, 'x' * 100, flush=True)")
        await runtime.start(start_workers(1, talks, talks, log_dir=tmp_path))
        troubles: list[str] = []
        seen: list[Any] = []
        while not (troubles and any(isinstance(event, Stopped) for event in seen)):
            seen.append(await until(events, object))
            if isinstance(seen[-1], LogTrouble):
                troubles.append(seen[-1].message)
        codes = [event.exit_code for event in seen if isinstance(event, WorkerExited)]
        assert codes == [0, 0]
        await runtime.stop(1, 0)  # nothing more was reported before the answer to this
        following = await until(events, object)
        assert isinstance(following, Stopped)
        assert len(troubles) == 1
        assert "stdout.log cannot be written: No space left on device" in troubles[0]

    run(scenario)
