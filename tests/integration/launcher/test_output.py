"""Output of the workers: prefixed, in order, bounded, and never blocking."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from elasticjob_agent.runtimes.local import LocalRuntime
from elasticjob_agent.worker_runtime import Hello, StartWorkers, Stopped, WorkerExited, WorkerStart
from tests.integration.launcher_rig import exits, process_tag, python, soon, start_workers, until
from tests.paths import ROOT

__all__ = ["process_tag"]

pytestmark = pytest.mark.usefixtures("process_tag")

LINES = 300_000
NOTE = re.compile(rb"\[elasticjob\] (\d+) bytes left out: .*\n")


def run(path: Path, scenario: Callable[[LocalRuntime, Any], Awaitable[None]]) -> bytes:
    """Return the launcher's standard output after the scenario; standard error is in `.err`."""

    async def whole() -> None:
        with path.open("wb") as out, path.with_suffix(".err").open("wb") as err:
            runtime = LocalRuntime(stdout=out.fileno(), stderr=err.fileno())
            events = runtime.events()
            try:
                await until(events, Hello)
                await scenario(runtime, events)
                await runtime.release(0, "")
            finally:
                await runtime.aclose()

    asyncio.run(whole())
    return path.read_bytes()


def output_of(path: Path, *sources: str) -> bytes:
    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        await runtime.start(start_workers(1, *map(python, sources)))
        assert {exited.exit_code for exited in (await exits(events, len(sources))).values()} == {0}
        await until(events, Stopped)

    return run(path, scenario)


def test_lines_keep_order_and_get_worker_prefix(tmp_path: Path) -> None:
    talk = "import sys\nfor i in range(20000): print(i, flush=i % 7 == 0)\nsys.stderr.write('e\\n')"
    lines = output_of(tmp_path / "out", talk, talk).decode().splitlines()
    for rank in (0, 1):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] {number}" for number in range(20000)]
    assert len(lines) == 40000
    assert sorted((tmp_path / "out.err").read_text().splitlines()) == ["[0] e", "[1] e"]


def test_unterminated_line_is_forwarded_while_worker_hangs(tmp_path: Path) -> None:
    source = "import time; print('loading', end='', flush=True); time.sleep(100)"

    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        await runtime.start(start_workers(1, python(source)))
        await soon(lambda: (tmp_path / "out").read_bytes() == b"[0] loading\n")
        await runtime.stop(1, 0)
        await until(events, Stopped)

    assert run(tmp_path / "out", scenario) == b"[0] loading\n"


def test_unterminated_last_line_gets_line_end(tmp_path: Path) -> None:
    assert output_of(tmp_path / "out", "print('a\\nb', end='')") == b"[0] a\n[0] b\n"


def test_binary_output_is_forwarded_unchanged(tmp_path: Path) -> None:
    source = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 4000)"
    forwarded = output_of(tmp_path / "out", source)
    states = [line.rpartition(b"\r")[2] for line in (bytes(range(256)) * 4000).split(b"\n")]
    assert forwarded == b"".join(b"[0] " + state + b"\n" for state in states)


def test_endless_line_is_split(tmp_path: Path) -> None:
    source = "import sys; sys.stdout.write('x' * 5_000_000)"
    pieces = output_of(tmp_path / "out", source).split(b"\n")[:-1]
    assert all(piece.startswith(b"[0] ") for piece in pieces)
    assert b"".join(piece[4:] for piece in pieces) == b"x" * 5_000_000
    assert len(pieces) > 10


def test_flood_of_lines_does_not_block_worker(tmp_path: Path) -> None:
    """The rate is at least 100,000 lines of 100 bytes a second, all forwarded and logged."""
    source = (
        f"import sys, time; start = time.monotonic(); line = 'x' * 99 + '\\n'\n"
        f"for i in range({LINES}): sys.stdout.write(line)\n"
        "sys.stdout.flush(); sys.stderr.write(str(time.monotonic() - start))"
    )
    seconds = 0.0

    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        nonlocal seconds
        worker = WorkerStart(0, python(source), {}, str(tmp_path / "logs"), "[0] ")
        await runtime.start(StartWorkers(1, (worker,), max_log_bytes=1 << 30))
        seconds = float((await exits(events, 1))[0].stderr_tail)
        await until(events, Stopped)

    forwarded = run(tmp_path / "out", scenario)
    assert LINES / seconds > 100_000
    assert forwarded == (b"[0] " + b"x" * 99 + b"\n") * LINES
    assert (tmp_path / "logs" / "stdout.log").stat().st_size == 100 * LINES


def test_stopped_reader_does_not_block_workers() -> None:
    """Beyond a limit output is dropped, counted to the byte, and the worker goes on."""
    line = "x" * 9_999 + "\n"
    source = f"import sys\nfor i in range(10000): sys.stdout.write({line!r})"
    pieces: list[bytes] = []

    async def scenario(write_fd: int, read_fd: int) -> None:
        runtime = LocalRuntime(stdout=write_fd)
        events = runtime.events()
        try:
            await until(events, Hello)
            await runtime.start(start_workers(1, python(source)))
            assert (await exits(events, 1))[0].exit_code == 0
            await until(events, Stopped)
            reading = asyncio.get_running_loop().run_in_executor(None, _read_all, read_fd, pieces)
            await soon(lambda: sum(map(len, pieces)) > 60_000_000)
            await runtime.start(start_workers(2, python("print('later')")))
            await until(events, Stopped, round=2)
            await runtime.release(0, "")
        finally:
            await runtime.aclose()
            os.close(write_fd)
        await reading

    read_fd, write_fd = os.pipe()
    asyncio.run(scenario(write_fd, read_fd))
    os.close(read_fd)
    lines = b"".join(pieces).splitlines(keepends=True)
    notes = [note for note in map(NOTE.fullmatch, lines) if note is not None]
    assert notes  # in place of the missing part: a small last piece may have fitted again
    assert lines[-1] == b"[0] later\n"
    forwarded = [text for text in lines[:-1] if NOTE.fullmatch(text) is None]
    left_out = sum(int(note[1]) for note in notes)
    # A line whose second half came a second late is two lines, each with a prefix and an end.
    cuts, rest = divmod(left_out + sum(map(len, forwarded)) - 10000 * len("[0] " + line), 5)
    assert (rest, cuts // 20) == (0, 0)


def _read_all(fd: int, pieces: list[bytes]) -> None:
    while piece := os.read(fd, 1 << 20):
        pieces.append(piece)


def test_closed_stdout_does_not_block_workers() -> None:
    async def scenario(write_fd: int) -> None:
        runtime = LocalRuntime(stdout=write_fd)
        events = runtime.events()
        try:
            await until(events, Hello)
            await runtime.start(start_workers(1, python("for i in range(9999): print('x' * 99)")))
            assert (await exits(events, 1))[0].exit_code == 0
            await runtime.release(0, "")
        finally:
            await runtime.aclose()
            os.close(write_fd)

    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    asyncio.run(scenario(write_fd))


def test_log_files_keep_first_and_newest_output_within_size_limit(tmp_path: Path) -> None:
    source = "for i in range(100_000): print(i)"

    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        worker = WorkerStart(0, python(source), {}, str(tmp_path / "logs"), "")
        await runtime.start(StartWorkers(1, (worker,), max_log_bytes=30_000))
        await until(events, Stopped)

    run(tmp_path / "out", scenario)
    logs = {path.name: path.read_bytes() for path in (tmp_path / "logs").iterdir()}
    assert sorted(logs) == ["stderr.log", "stdout.log", "stdout.log.1", "stdout.log.head"]
    assert sum(map(len, logs.values())) <= 30_000
    head, older, newest = logs["stdout.log.head"], logs["stdout.log.1"], logs["stdout.log"]
    assert head.startswith(b"0\n1\n2\n")
    numbers = [int(line) for line in (older + newest).splitlines()]
    assert numbers == list(range(numbers[0], 100_000))
    assert len(older + newest) > 10_000
    assert logs["stderr.log"] == b""


LIMITED = """
import resource, sys
sys.path.append(sys.argv[1])
from pathlib import Path
from elasticjob_launcher.processes.output import BoundedLog

log = BoundedLog(Path(sys.argv[2]), 1 << 20)
resource.setrlimit(resource.RLIMIT_FSIZE, (10, resource.RLIM_INFINITY))
for data in (b"12345678", b"abcd\\n", b"more\\n"):
    try:
        log.write(data)
    except OSError as error:
        print(error.errno)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.write(b"again\\n")
log.close()
"""


def test_log_records_loss_after_full_disk_has_space(tmp_path: Path) -> None:
    log = tmp_path / "deep" / "stdout.log"
    sidecar = str(ROOT / "sidecar")
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, sidecar, str(log)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["27", "27"])
    assert log.read_bytes() == b"12345678ab\n[elasticjob] 8 bytes are missing here\nagain\n"


def test_exit_is_reported_with_output_still_being_written(tmp_path: Path) -> None:
    """The exit comes with all that the worker wrote, even when a child holds its pipes open."""
    source = (
        "import os, sys, time\n"
        "if os.fork() == 0: time.sleep(100)\n"
        "sys.stderr.write('y' * 50_000 + 'the end'); sys.exit(2)"
    )

    async def scenario(runtime: LocalRuntime, events: Any) -> None:
        told = time.monotonic()
        await runtime.start(start_workers(1, python(source)))
        exited = await until(events, WorkerExited)
        assert time.monotonic() - told < 50, "the child would hold the pipe for 100 s"
        assert exited.stderr_tail.endswith("the end")
        assert len(exited.stderr_tail) == 16 * 1024
        await runtime.stop(1, 0)
        await until(events, Stopped)

    run(tmp_path / "out", scenario)
