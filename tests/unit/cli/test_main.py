"""Errors that no command handles."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from elasticjob_cli import main
from elasticjob_cli.errors import BadInput, CommandError, ExitCode
from elasticjob_cli.main import application

MANIFEST = """\
apiVersion: elasticjob.dev/v1alpha1
kind: ElasticJob
metadata: {name: job}
spec:
  maxNodes: 1
  template: {spec: {containers: [{name: trainer, image: "trainer:1", command: ["true"]}]}}
"""
INTERRUPTED_IMPORT = """
import os, sys
from elasticjob_cli import entry
modules = [sys.argv.pop(1)]
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if [name] == modules:
            modules.clear()
            try:
                os.kill(os.getpid(), 2)
            except KeyboardInterrupt:
                if {swallows}:
                    return
                raise
sys.meta_path.insert(0, Interrupting())
entry.main()
"""


@pytest.mark.parametrize("module", ["signal", "elasticjob_cli.main", "typer", "pydantic", "yaml"])
def test_ctrl_c_during_command_import_prints_no_traceback(module: str) -> None:
    words = [sys.executable, "-c", INTERRUPTED_IMPORT.format(swallows=False), module, "validate"]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (ExitCode.INTERRUPTED, "", "")


def test_ctrl_c_during_import_that_swallows_it_is_not_lost() -> None:
    words = [
        sys.executable,
        "-c",
        INTERRUPTED_IMPORT.format(swallows=True),
        "pydantic",
        "validate",
        "--help",
    ]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (ExitCode.INTERRUPTED, "", "")


def test_unwritable_output_is_reported_in_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "elasticjob_cli", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ran.returncode == ExitCode.FAILED
    assert ran.stderr == "elasticjob: the output cannot be written: No space left on device\n"


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """Restore SIGINT: `main` sets its default action, which ends the process."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_sigint")
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "some/file"), "some/file: No space left on device"),
        (PermissionError(13, "Permission denied", "a/b"), "a/b: Permission denied"),
    ],
)
def test_operating_system_error_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, said: str
) -> None:
    def command() -> None:
        raise error

    monkeypatch.setattr(main, "application", lambda first: lambda prog_name: command())
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == ExitCode.FAILED
    assert capsys.readouterr().err == f"elasticjob: {said}\n"


def call(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "elasticjob_cli", *arguments]
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)


def test_removed_current_folder_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    script = f"cd {folder}; rmdir {folder}; {sys.executable} -m elasticjob_cli run job.yaml"
    ran = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == ExitCode.BAD_INPUT, ran.stderr
    (tmp_path / "job.yaml").write_text(MANIFEST)
    script = f"mkdir {folder}; {script.replace('job.yaml', '../job.yaml')}"
    ran = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == ExitCode.FAILED
    assert ran.stderr == "elasticjob: the current folder was removed: change to another one\n"


def test_agent_is_not_started_in_removed_folder(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    (tmp_path / "train.py").write_text("")
    words = f"agent --rdzv-id=x --rdzv-endpoint=127.0.0.1:1 {tmp_path}/train.py"
    script = f"rmdir {tmp_path}/gone; {sys.executable} -m elasticjob_cli {words}"
    ran = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path / "gone", capture_output=True, text=True, check=False
    )
    assert ran.returncode == ExitCode.BAD_INPUT
    assert ran.stderr == "elasticjob: the current folder was removed: change to another one\n"


def test_full_temporary_disk_is_reported(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(MANIFEST)
    script = f"ulimit -f 0; {sys.executable} -m elasticjob_cli run job.yaml"
    ran = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == ExitCode.FAILED
    assert "there is no room for temporary files: No usable temporary directory" in ran.stderr
    assert "set TMPDIR to a folder" in ran.stderr


def test_undecodable_names_are_shown(tmp_path: Path) -> None:
    file = os.fsencode(tmp_path) + b"/j\xff.yaml"
    Path(os.fsdecode(file)).write_text(MANIFEST)
    ran = call("validate", os.fsdecode(file))
    assert (ran.returncode, ran.stdout.splitlines()[0]) == (0, f"{tmp_path}/j\\udcff.yaml: valid")


@pytest.mark.parametrize("verb", [["run", "job.yaml"], ["scale", "job"]])
@pytest.mark.parametrize("nodes", ["-1", "x", "2147483648", "1.5"])
def test_invalid_number_of_nodes_is_refused(verb: list[str], nodes: str) -> None:
    ran = call(*verb, "--nodes", nodes)
    assert ran.returncode == ExitCode.BAD_INPUT
    assert "Invalid value for '--nodes'" in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("scale job --nodes abc", "must be an integer; got 'abc'"),
        ("scale job --nodes 99999999", "must be at most 16384; got"),
        ("logs job --rank -1", "must be at least 0; got"),
        ("get -o jsn", "must be one of wide, json, yaml, name; got 'jsn', did you mean json?"),
        (
            "fault kil job pod",
            "must be one of kill-worker, kill-agent, kill-node, drain; got 'kil'",
        ),
        ("run --nodes x train.py", "must be"),
    ],
)
def test_usage_error_states_the_requirement_and_has_no_library_text(
    words: str, message: str
) -> None:
    result = CliRunner().invoke(application(words.split()[0]), words.split())
    assert result.exit_code == ExitCode.BAD_INPUT
    assert message in result.stderr
    assert "Input should" not in result.stderr
    assert "Value error" not in result.stderr


@pytest.mark.parametrize("words", ["--context prod get", "-n team-a get", "--namespace=x get"])
def test_option_before_the_command_is_refused_with_its_place(words: str) -> None:
    option = words.partition(" ")[0].partition("=")[0]
    with pytest.raises(BadInput, match=f"^{option} must stand behind the command: `get {option} "):
        application(words.partition(" ")[0])


@pytest.mark.parametrize("words", ["get -n A_B", "delete -n A_B --all", "get -n x/y"])
def test_bad_namespace_is_refused(words: str) -> None:
    result = CliRunner().invoke(application(words.split()[0]), words.split())
    assert isinstance(result.exception, CommandError)
    assert "namespace of a job must be a DNS label" in str(result.exception)
