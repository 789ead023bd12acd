"""Programs as forks: their ends are those of programs, and of the processes that stand for them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.processes import alive
from tests.integration.agent_rig import until
from tests.integration.torch.forked_program import forking_server

PROGRAM = """
import os, signal, sys, time
assert "torch" in sys.modules
print(os.environ["WORD"], sys.argv[1:], os.getcwd(), flush=True)
match sys.argv[1]:
    case "code":
        sys.exit(int(sys.argv[2]))
    case "text":
        sys.exit("no reason")
    case "error":
        raise ValueError(13)
    case "signal":
        os.kill(os.getpid(), int(sys.argv[2]))
    case "handler":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
print(os.getpid(), flush=True)
time.sleep(1000)
"""


@pytest.fixture(scope="module")
def words() -> Iterator[tuple[str, str]]:
    with forking_server() as words:
        yield words


def started(words: tuple[str, str], folder: Path, *arguments: str) -> subprocess.Popen[str]:
    script = folder / "program.py"
    script.write_text(PROGRAM)
    return subprocess.Popen(
        [sys.executable, *words, str(script), *arguments],
        env={**os.environ, "WORD": "a word"},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "output"),
    [
        (("code", "0"), 0, ""),
        (("code", "7"), 7, ""),
        (("text",), 1, "no reason\n"),
        (("error",), 1, "ValueError: 13\n"),
        (("signal", str(int(signal.SIGTERM))), -signal.SIGTERM, ""),
        (("signal", str(int(signal.SIGKILL))), -signal.SIGKILL, ""),
    ],
)
def test_fork_ends_as_the_program_does(
    words: tuple[str, str], tmp_path: Path, arguments: tuple[str, ...], code: int, output: str
) -> None:
    process = started(words, tmp_path, *arguments)
    printed, _ = process.communicate(timeout=120)
    assert process.returncode == code, printed
    assert printed.startswith(f"a word {list(arguments)} {tmp_path}\n")
    assert printed.endswith(output)


@pytest.mark.parametrize(
    ("mode", "number", "code"),
    [
        ("handler", signal.SIGTERM, 9),
        ("none", signal.SIGTERM, -signal.SIGTERM),
        ("none", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_fork_gets_the_signals_and_ends_with_its_process(
    words: tuple[str, str], tmp_path: Path, mode: str, number: signal.Signals, code: int
) -> None:
    with started(words, tmp_path, mode) as process:
        assert process.stdout is not None
        process.stdout.readline()
        pid = int(process.stdout.readline())
        assert alive(pid)
        process.send_signal(number)
        assert process.wait(120) == code
        until(lambda: not alive(pid), "the end of the fork")


def test_server_survives_a_process_that_is_killed_before_its_order(
    words: tuple[str, str], tmp_path: Path
) -> None:
    for sent in (b"", b"\0\0\1\0", b"\0\0\1\0[["):
        with socket.socket(socket.AF_UNIX) as connection, Path(os.devnull).open() as stream:
            connection.connect(words[1])
            if sent:
                socket.send_fds(connection, [sent], [stream.fileno()] * 3)
    process = started(words, tmp_path, "code", "7")
    process.communicate(timeout=120)
    assert process.returncode == 7


def test_module_is_executed_as_python_does(words: tuple[str, str], tmp_path: Path) -> None:
    called = [sys.executable, *words, "-m", "torch.distributed.run", "--help"]
    done = subprocess.run(called, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--rdzv-backend" in done.stdout or "--rdzv_backend" in done.stdout
