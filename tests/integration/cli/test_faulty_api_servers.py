"""Verbs on a cluster whose API server breaks answers off, or does not answer, and Ctrl-C then."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from elasticjob_cli import kubectl
from elasticjob_cli.errors import CommandError, ExitCode
from elasticjob_cli.kubectl import Kubectl, NoAnswer
from elasticjob_cli.main import plugin
from tests.cluster.programs import programs
from tests.integration.etcd_server import wait_until
from tests.integration.faulty_servers import (
    Handler,
    reset_answer,
    serving_in_thread,
    short_answer,
    silence,
    stalled_answer,
)

WAIT_SECONDS = 60.0


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use kubectl without the answers that it has kept from other servers."""
    monkeypatch.setenv("PATH", f"{programs('kubernetes')}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("ELASTICJOB_PLACE", raising=False)


def configure(folder: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": f"http://{address}"}}],
        "users": [{"name": "test", "user": {"token": "secret-token"}}],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(document))
    monkeypatch.setenv("KUBECONFIG", str(path))


def failed(*words: str) -> CommandError:
    """Return the error of a verb of the plug-in."""
    error = CliRunner().invoke(plugin(words[0]), list(words)).exception
    assert isinstance(error, CommandError), error
    assert "\n" not in str(error)
    return error


@pytest.mark.parametrize("handler", [reset_answer, short_answer])
@pytest.mark.parametrize("verb", ["get", "explain", "logs"])
def test_broken_answer_is_one_line_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: Handler, verb: str
) -> None:
    with serving_in_thread(handler) as address:
        configure(tmp_path, address, monkeypatch)
        error = failed(verb, "job")
    assert str(error).startswith(
        "the connection to the API server broke in the middle of an answer: '"
    )
    assert "; try again; if it lasts, check the cluster's address" in str(error)


@pytest.mark.parametrize("handler", [silence, stalled_answer])
@pytest.mark.parametrize("words", ["get -w", "explain job", "logs -f job", "scale job --nodes 2"])
def test_silent_api_server_is_reported_before_the_limit_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handler: Handler, words: str
) -> None:
    monkeypatch.setattr(kubectl, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(kubectl, "CHECK_SECONDS", 1)
    with serving_in_thread(handler) as address:
        configure(tmp_path, address, monkeypatch)
        error = failed(*words.split())
    assert isinstance(error, NoAnswer)
    assert str(error).startswith(f"the API server 'http://{address}' does not answer: check ")


def test_slow_api_server_that_answers_the_check_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubectl, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(kubectl, "CHECK_SECONDS", 30)
    checks: list[bytes] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Refuse every request, and others than that of the check only after it."""
        while request := await reader.readuntil(b"\r\n\r\n"):
            if request.startswith(b"GET /version"):
                checks.append(request)
            while not checks:
                await asyncio.sleep(0.01)
            writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()

    with serving_in_thread(handler) as address:
        configure(tmp_path, address, monkeypatch)
        with pytest.raises(CommandError) as error:
            Kubectl().jobs(None)
    assert not isinstance(error.value, NoAnswer)
    assert checks
    assert all(b"secret-token" not in request for request in checks), "no sign-in for the check"


def is_gone(group: int) -> bool:
    """Return True if no process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("whole_group", [True, False], ids=["terminal", "process"])
@pytest.mark.parametrize("words", ["explain job", "get -w", "logs -f job"])
def test_ctrl_c_ends_a_verb_that_waits_for_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, whole_group: bool
) -> None:
    requested = threading.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        requested.set()
        await silence(reader, writer)

    with serving_in_thread(handler) as address:
        configure(tmp_path, address, monkeypatch)
        process = subprocess.Popen(
            [sys.executable, "-m", "elasticjob_cli", *words.split(), "--cluster"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert requested.wait(WAIT_SECONDS), "kubectl asks nothing"
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=WAIT_SECONDS)
        assert (process.returncode, output) == (ExitCode.INTERRUPTED, b"")
        wait_until(lambda: is_gone(process.pid), "the end of kubectl")
