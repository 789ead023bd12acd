"""Copies of the training state before workers are stopped: waits of a real launcher, and limits."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticjob_agent.worker_runtime import Started, Stopped
from tests.integration.launcher_rig import (
    AgentProcess,
    LauncherProcess,
    StartLauncher,
    alive,
    attached,
    launcher_file,
    process_tag,
    python,
    soon,
    start_launcher,
    start_workers,
    until,
)

__all__ = ["launcher_file", "process_tag", "start_launcher"]

LONG_MS, SHORT_MS = 900_000, 300
"""A long copy, and a long grace period, are longer than the time limit of a test."""
LONG_GRACE_SECONDS = 2000.0
PATIENT = """
import sys
sys.path.insert(0, {launcher!r})
from elasticjob_launcher.processes import stop_copies, workers
stop_copies.COPY_SECONDS = workers.COPY_SECONDS = 1000.0
from elasticjob_launcher.__main__ import main
main()
"""
"""Launcher without the product's limit of a copy."""
WORKER = """
import os, socket, struct, sys, time
folder, (out, rank) = os.environ["ELASTICJOB_SNAPSHOT_FOLDER"], sys.argv[1:]
os.chdir(folder)
{prepare}
open(out + "/folder", "w").write(folder)
open(out + "/ready-" + rank, "w").close()
{then}
time.sleep(1000)
"""
LISTENS = "s = socket.socket(socket.AF_UNIX); s.bind('asked-' + rank); s.listen(1)"
ANSWERS = """
link, _ = s.accept()
open(out + "/asked-" + rank, "w").close()
link.sendall(struct.pack("<4sI", b"EJSC", {milliseconds}))
time.sleep({seconds})
open(out + "/copied-" + rank, "w").close()
{end}
"""


@pytest.fixture
def patient_launcher(
    launcher_file: Path, process_tag: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartLauncher]:
    """Yield a function that starts launchers that wait for a copy as long as the worker asks."""
    file = tmp_path_factory.mktemp("patient") / "launcher.py"
    file.write_text(PATIENT.format(launcher=str(launcher_file)))
    started: list[LauncherProcess] = []

    def start() -> LauncherProcess:
        started.append(LauncherProcess(file))
        return started[-1]

    yield start
    for launcher in started:
        launcher.close()


def worker(out: Path, rank: int, prepare: str, then: str = "") -> tuple[str, ...]:
    return (*python(WORKER.format(prepare=prepare, then=then)), str(out), str(rank))


def answers(milliseconds: int, seconds: float, end: str = "link.close()") -> str:
    return ANSWERS.format(milliseconds=milliseconds, seconds=seconds, end=end)


def run(
    start: StartLauncher,
    out: Path,
    workers: list[tuple[str, ...]],
    then: Callable[[Any, list[int]], Awaitable[None]],
) -> None:
    """Start a round, wait until its workers are ready, call `then` and wait for the round's end."""

    async def scenario() -> None:
        runtime, events, _ = await attached(start())
        await runtime.start(start_workers(1, *workers))
        started = await until(events, Started)
        await soon(lambda: len(list(out.glob("ready-*"))) == len(workers))
        pids = [started.pids[rank] for rank in sorted(started.pids)]
        await then(runtime, pids)
        await until(events, Stopped)
        assert not any(map(alive, pids))
        await runtime.aclose()

    asyncio.run(scenario())


async def stop(runtime: Any, _: list[int]) -> None:
    await runtime.stop(1, 0)


def test_workers_are_killed_once_all_have_copied(
    patient_launcher: StartLauncher, tmp_path: Path
) -> None:
    workers = [
        worker(tmp_path, 0, "", ""),  # it knows nothing of snapshots
        worker(tmp_path, 1, LISTENS, answers(LONG_MS, 0.1)),
        worker(tmp_path, 2, LISTENS, answers(LONG_MS, 0.5)),
    ]
    run(patient_launcher, tmp_path, workers, stop)
    assert (tmp_path / "copied-1").exists()
    assert (tmp_path / "copied-2").exists()


def test_worker_that_exits_while_it_copies_ends_the_wait(
    patient_launcher: StartLauncher, tmp_path: Path
) -> None:
    workers = [worker(tmp_path, 0, LISTENS, answers(LONG_MS, 0.1, "os._exit(1)"))]
    run(patient_launcher, tmp_path, workers, stop)
    assert (tmp_path / "copied-0").exists()


REQUESTED = """
link, _ = s.accept()
magic, kind, milliseconds = struct.unpack("<4sBI", link.recv(9, socket.MSG_WAITALL))
open(out + f"/{{magic.decode()}}-{{kind}}-{{milliseconds}}", "w").close()
link.close()
"""


@pytest.mark.parametrize(
    ("grace_seconds", "dump", "copies", "ends_step", "request_file"),
    [
        (0.0, False, True, True, "EJSC-0-10000"),
        (8.0, True, True, True, "EJSC-0-10000"),
        (8.0, False, True, True, "EJSC-1-4000"),
        (8.0, False, True, False, "EJSC-0-4000"),
        (8.0, False, False, True, "EJSC-2-4000"),
        (8.0, False, False, False, ""),
        (8.0, True, False, True, ""),
        (0.0, False, False, True, ""),
    ],
)
def test_request_names_the_kind_of_the_stop_and_its_time(
    start_launcher: StartLauncher,
    tmp_path: Path,
    grace_seconds: float,
    dump: bool,
    copies: bool,
    ends_step: bool,
    request_file: str,
) -> None:
    """A stop with stacks or without a grace period waits for no step."""

    async def ordered(runtime: Any, _: list[int]) -> None:
        await runtime.stop(1, grace_seconds, dump, copies=copies, ends_step=ends_step)

    workers = [worker(tmp_path, 0, LISTENS, REQUESTED.format())]
    run(start_launcher, tmp_path, workers, ordered)
    assert [path.name for path in tmp_path.glob("EJSC*")] == (
        [request_file] if request_file else []
    )


def test_limit_of_a_copy_ends_the_wait(patient_launcher: StartLauncher, tmp_path: Path) -> None:
    workers = [worker(tmp_path, 0, LISTENS, answers(SHORT_MS, 1000))]
    run(patient_launcher, tmp_path, workers, stop)
    assert (tmp_path / "asked-0").exists()
    assert not (tmp_path / "copied-0").exists()


@pytest.mark.parametrize(
    ("prepare", "then"),
    [
        ("os.symlink('/dev/zero', 'asked-0')", ""),
        ("os.symlink('asked-0', 'asked-0')", ""),
        ("os.mkdir('asked-0')", ""),
        ("os.mkfifo('asked-0')", ""),
        ("open('asked-0', 'w').write('x' * 1000)", ""),
        (LISTENS + "; s.close()", ""),
        (LISTENS, "s.accept()[0].sendall(b'x' * 100000)"),
        (LISTENS, "s.accept()[0].sendall(struct.pack('<4sI', b'EJS?', 5000))"),
        (LISTENS, "s.accept()[0].close()"),
        (LISTENS, "link, _ = s.accept(); time.sleep(1000)"),  # no answer
        (LISTENS, "time.sleep(1000)"),
        (LISTENS + "; os.rename(folder, folder + '.moved')", ""),
        (LISTENS + "; os.rename(folder, folder + '.m'); os.symlink(folder + '.m', folder)", ""),
    ],
)
def test_worker_that_does_not_answer_properly_is_killed(
    patient_launcher: StartLauncher, tmp_path: Path, prepare: str, then: str
) -> None:
    workers = [worker(tmp_path, 0, prepare, then)]
    run(patient_launcher, tmp_path, workers, stop)
    folder = (tmp_path / "folder").read_text()
    for end in ("", ".m", ".moved"):
        path = Path(folder + end)
        if path.is_symlink():
            path.unlink()
        shutil.rmtree(path, ignore_errors=True)


def test_limit_of_a_worker_is_capped(start_launcher: StartLauncher, tmp_path: Path) -> None:
    workers = [worker(tmp_path, 0, LISTENS, answers(2**32 - 1, 1000))]
    run(start_launcher, tmp_path, workers, stop)


@pytest.mark.parametrize("grace_seconds", [0, LONG_GRACE_SECONDS])
def test_stop_without_copies_ends_the_wait(
    patient_launcher: StartLauncher, tmp_path: Path, grace_seconds: float
) -> None:
    async def without(runtime: Any, _: list[int]) -> None:
        await runtime.stop(1, grace_seconds)
        await soon(lambda: (tmp_path / "asked-0").exists())
        await runtime.stop(1, grace_seconds, copies=False)

    workers = [worker(tmp_path, 0, LISTENS, answers(LONG_MS, 1000))]
    run(patient_launcher, tmp_path, workers, without)


@pytest.mark.parametrize("grace_seconds", [0, 60])
def test_stop_that_a_reconnected_agent_repeats_lets_the_copy_complete(
    start_launcher: StartLauncher, tmp_path: Path, grace_seconds: float
) -> None:
    launcher = start_launcher()

    async def scenario() -> None:
        runtime, events, _ = await attached(launcher)
        command = worker(tmp_path, 0, LISTENS, answers(LONG_MS, 1.0))
        await runtime.start(start_workers(1, command))
        await until(events, Started)
        await soon(lambda: (tmp_path / "ready-0").exists())
        await runtime.stop(1, grace_seconds)
        await soon(lambda: (tmp_path / "asked-0").exists())
        again, events, _ = await attached(launcher)
        await again.stop(1, grace_seconds)
        await until(events, Stopped)
        await again.aclose()
        await runtime.aclose()

    asyncio.run(scenario())
    assert (tmp_path / "copied-0").exists()


HANDLES = """
import signal
def mark(*_):
    copied = os.path.exists(out + "/copied-" + rank)
    open(out + ("/terminated-copied" if copied else "/terminated"), "w").close()
    os._exit(0)
signal.signal(signal.SIGTERM, mark)
""" + LISTENS  # fmt: skip


async def stop_gracefully(runtime: Any, _: list[int]) -> None:
    await runtime.stop(1, LONG_GRACE_SECONDS)


def test_workers_get_sigterm_once_they_have_copied(
    patient_launcher: StartLauncher, tmp_path: Path
) -> None:
    workers = [worker(tmp_path, 0, HANDLES, answers(LONG_MS, 0.3))]
    run(patient_launcher, tmp_path, workers, stop_gracefully)
    assert (tmp_path / "terminated-copied").exists()


def test_copy_leaves_half_of_the_grace_period_to_the_script(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    async def briefly(runtime: Any, _: list[int]) -> None:
        await runtime.stop(1, 6)

    workers = [worker(tmp_path, 0, HANDLES, answers(LONG_MS, 1000))]
    run(start_launcher, tmp_path, workers, briefly)
    assert (tmp_path / "terminated").exists()


def test_shorter_grace_period_ends_a_copy_in_time_for_the_script(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    async def shortened(runtime: Any, _: list[int]) -> None:
        await runtime.stop(1, 60)
        await soon(lambda: (tmp_path / "asked-0").exists())
        await runtime.stop(1, 8)  # shorter than the copy

    workers = [worker(tmp_path, 0, HANDLES, answers(LONG_MS, 1000))]
    run(start_launcher, tmp_path, workers, shortened)
    assert (tmp_path / "terminated").exists()


IGNORES = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + LISTENS


@pytest.mark.parametrize(
    ("first", "further"),
    [
        ({}, {"copies": False}),
        ({}, {}),
        ({"copies": False, "ends_step": True}, {"copies": False, "ends_step": True}),
        ({"copies": False, "ends_step": True}, {"copies": False}),
        ({"copies": False}, {"copies": False}),
    ],
)
def test_further_stop_extends_no_grace_period(
    start_launcher: StartLauncher, tmp_path: Path, first: dict[str, Any], further: dict[str, Any]
) -> None:
    async def twice(runtime: Any, pids: list[int]) -> None:
        await runtime.stop(1, 4.0, **first)
        if first.get("copies", True) or first.get("ends_step"):
            # A worker without a processor may be killed before it accepts the request.
            await soon(lambda: (tmp_path / "asked-0").exists() or not alive(pids[0]))
        await runtime.stop(1, LONG_GRACE_SECONDS, **further)

    workers = [worker(tmp_path, 0, IGNORES, answers(LONG_MS, 1000))]
    run(start_launcher, tmp_path, workers, twice)


def test_shorter_stop_during_a_copy_shortens_the_period_for_stacks(
    start_launcher: StartLauncher, tmp_path: Path
) -> None:
    handles = "import signal; signal.signal(signal.SIGABRT, lambda *_: None); " + LISTENS

    async def shortened(runtime: Any, _: list[int]) -> None:
        await runtime.stop(1, LONG_GRACE_SECONDS, True)
        await soon(lambda: (tmp_path / "asked-0").exists())
        await runtime.stop(1, 1.0, True)

    workers = [worker(tmp_path, 0, handles, answers(LONG_MS, 0.5) + "while 1: time.sleep(1)")]
    run(start_launcher, tmp_path, workers, shortened)


def test_stop_that_ends_no_step_ends_the_wait_for_one(
    patient_launcher: StartLauncher, tmp_path: Path
) -> None:
    """Such as one at the end of the job, once this node leaves."""

    async def finished(runtime: Any, _: list[int]) -> None:
        await runtime.stop(1, LONG_GRACE_SECONDS, copies=False, ends_step=True)
        await soon(lambda: (tmp_path / "asked-0").exists())
        await runtime.stop(1, LONG_GRACE_SECONDS, copies=False)

    workers = [worker(tmp_path, 0, LISTENS, answers(LONG_MS, 1000))]
    run(patient_launcher, tmp_path, workers, finished)


def test_node_that_then_leaves_goes_on_to_end_its_step(
    patient_launcher: StartLauncher, tmp_path: Path
) -> None:
    """The workers of other nodes wait for the end of the same step."""

    async def leaving(runtime: Any, _: list[int]) -> None:
        await runtime.stop(1, LONG_GRACE_SECONDS, ends_step=True)
        await soon(lambda: (tmp_path / "asked-0").exists())
        await runtime.stop(1, LONG_GRACE_SECONDS, copies=False, ends_step=True)

    workers = [worker(tmp_path, 0, LISTENS, answers(LONG_MS, 2.0))]
    run(patient_launcher, tmp_path, workers, leaving)
    assert (tmp_path / "copied-0").exists()


def test_stop_without_copies_gives_the_script_its_whole_grace_period(
    patient_launcher: StartLauncher, tmp_path: Path
) -> None:
    async def leave(runtime: Any, _: list[int]) -> None:
        await runtime.stop(1, LONG_GRACE_SECONDS, copies=False, ends_step=True)

    workers = [worker(tmp_path, 0, HANDLES, answers(LONG_MS, 1000))]
    run(patient_launcher, tmp_path, workers, leave)
    assert (tmp_path / "terminated").exists()
    assert not (tmp_path / "asked-0").exists()


@pytest.mark.parametrize("line", ['"$@"; exit $?', 'python() { "$@"; }; python "$@" & wait'])
def test_handler_behind_a_shell_gets_its_whole_grace_period(
    start_launcher: StartLauncher, tmp_path: Path, line: str
) -> None:
    """The order in which the signals end the shell and its child does not matter."""

    async def leave(runtime: Any, _: list[int]) -> None:
        await runtime.stop(1, 60, copies=False, ends_step=True)
        await soon(lambda: any(tmp_path.glob("terminated*")))

    requested = REQUESTED.format() + "time.sleep(1000)"
    behind = ("bash", "-c", line, "-", *worker(tmp_path, 0, HANDLES, requested))
    run(start_launcher, tmp_path, [behind], leave)
    assert not (tmp_path / "EJSC-2-30000").exists()
    assert not list(tmp_path.glob("EJSC-2-[1-9]*"))


@pytest.mark.parametrize("line", ["exec", ""])
def test_handler_gets_its_grace_period_also_if_the_node_leaves_during_a_planned_stop(
    patient_launcher: StartLauncher, tmp_path: Path, line: str
) -> None:
    """The handler may be that of the worker itself or of a process behind a shell."""

    async def leaving(runtime: Any, _: list[int]) -> None:
        await runtime.stop(1, LONG_GRACE_SECONDS, ends_step=True)
        await soon(lambda: (tmp_path / "asked-0").exists())
        await runtime.stop(1, LONG_GRACE_SECONDS, copies=False, ends_step=True)
        await soon(lambda: any(tmp_path.glob("terminated*")))

    behind = worker(tmp_path, 0, HANDLES, answers(LONG_MS, 1000))
    run(
        patient_launcher, tmp_path, [("bash", "-c", f'{line} "$@"; exit $?', "-", *behind)], leaving
    )
    assert not (tmp_path / "copied-0").exists()


def test_stop_without_grace_period_ends_a_graceful_one_during_a_copy(
    patient_launcher: StartLauncher, tmp_path: Path
) -> None:
    async def hurried(runtime: Any, _: list[int]) -> None:
        await runtime.stop(1, LONG_GRACE_SECONDS)
        await soon(lambda: (tmp_path / "asked-0").exists())
        await runtime.stop(1, LONG_GRACE_SECONDS - 10)
        await runtime.stop(1, 0)

    workers = [worker(tmp_path, 0, HANDLES, answers(LONG_MS, 1000))]
    run(patient_launcher, tmp_path, workers, hurried)
    assert not list(tmp_path.glob("terminated*"))


def test_deadline_kills_at_once_also_during_a_copy(
    patient_launcher: StartLauncher, tmp_path: Path
) -> None:
    """Other nodes may start a newer round after it: no copy may put it off."""
    for number, asks in enumerate((False, True)):
        out = tmp_path / str(number)
        out.mkdir()
        command = worker(out, 0, LISTENS, answers(LONG_MS, 1000))
        launcher = patient_launcher()
        agent = AgentProcess.of(launcher, command, live_seconds=5.0)
        [pid] = agent.worker_pids
        asyncio.run(soon((out / "ready-0").exists))  # the agent keeps it alive

        async def scenario(out: Path = out, launcher: Any = launcher, asks: bool = asks) -> None:
            runtime, events, _ = await attached(launcher)
            if asks:
                await runtime.stop(1, 0)
                await soon(lambda: (out / "asked-0").exists())
            await until(events, Stopped)
            await runtime.aclose()

        agent.kill()
        asyncio.run(scenario())
        assert not alive(pid)
        assert (out / "asked-0").exists() is asks
