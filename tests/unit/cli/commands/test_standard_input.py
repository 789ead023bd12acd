"""Manifest `-`: input from standard input, and messages about it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from elasticjob_cli.commands.run import Choice, prepare
from elasticjob_cli.errors import BadInput
from elasticjob_cli.main import application
from elasticjob_cli.manifest_job import folder_of
from elasticjob_operator.model import manifest

JOB = """\
apiVersion: elasticjob.dev/v1alpha1
kind: ElasticJob
metadata: {name: good}
spec:
  maxNodes: 4
  template:
    spec:
      containers:
        - {name: trainer, image: "trainer:1", command: [python3, -c, pass]}
"""


def call(*arguments: str, text: str | bytes) -> Result:
    return CliRunner().invoke(application(arguments[0]), arguments, input=text)


def test_manifest_is_read_from_standard_input() -> None:
    found = call("validate", "-", text=JOB)
    assert (found.exit_code, found.stdout) == (
        0,
        "standard input: valid\n"
        "  good: launch PerWorker (PlainCommand): the command is run once for each worker\n",
    )


WARNED = JOB.replace("    spec:\n", "    spec:\n      hostIPC: true\n")
WARNING = "standard input:8:16: spec.template.spec.hostIPC: warning (HostIPC): the trainer gets"


@pytest.mark.parametrize(("options", "code"), [((), 0), (("--strict",), 3)])
def test_warnings_are_errors_only_if_strict(options: tuple[str, ...], code: int) -> None:
    other = JOB.replace("good", "other")
    found = call("validate", *options, "-", text=WARNED + "---\n" + other)
    launch = "launch PerWorker (PlainCommand): the command is run once for each worker\n"
    valid = f"standard input: valid\n  good: {launch}  other: {launch}"
    assert (found.exit_code, found.stdout) == (code, valid)
    assert found.stderr.startswith(WARNING)
    assert len(found.stderr.splitlines()) == 1


def test_errors_beside_warnings_have_the_code_of_errors() -> None:
    found = call("validate", "--strict", "-", text=WARNED + "---\n" + JOB.replace("4", "x"))
    assert (found.exit_code, found.stdout) == (2, "")
    assert "spec.maxNodes: must be an integer" in found.stderr
    assert WARNING in found.stderr


def test_run_prints_warnings_before_the_job_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(WARNED)
    prepare(str(file), Choice())
    assert f"{file}:8:16: spec.template.spec.hostIPC: warning (HostIPC)" in capsys.readouterr().err


def test_number_of_restarts_replaces_that_of_the_manifest(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB.replace("maxNodes: 4", "maxNodes: 4\n  maxRestarts: 9"))
    assert prepare(str(file), Choice())[0].spec.max_restarts == 9
    assert prepare(str(file), Choice(max_restarts=1))[0].spec.max_restarts == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (JOB.replace("4", "x"), "standard input:5:13: spec.maxNodes: must be an integer; got 'x'"),
        ("", "standard input:1:1: must hold an ElasticJob; it is empty"),
        (b"a: \xff", "standard input: must be UTF-8 text: byte 3 is not"),
        (b"\xef\xbb\xbf" + JOB.replace("4", "0").encode(), "standard input:5:13: spec.maxNodes"),
    ],
)
def test_every_command_reports_invalid_standard_input(text: str | bytes, said: str) -> None:
    validated = call("validate", "-", text=text)
    assert (validated.exit_code, validated.stdout) == (2, "")
    assert said in validated.stderr
    ran = call("run", "-", text=text)
    assert isinstance(ran.exception, BadInput)
    assert said in str(ran.exception)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kind: ConfigMap\n", "standard input contains no PyTorchJob of kubeflow.org/v1"),
        (b"a: \xff", "standard input: must be UTF-8 text"),
        ("a: [", "standard input:1:5: must be YAML"),
    ],
)
def test_convert_reports_invalid_standard_input(text: str | bytes, said: str) -> None:
    found = call("convert", "-", text=text)
    assert said in (str(found.exception) if isinstance(found.exception, BadInput) else found.stderr)


def test_standard_input_is_accepted_once() -> None:
    found = call("validate", "-", "-", text=JOB)
    assert isinstance(found.exception, BadInput)
    assert "must be given once" in str(found.exception)


def test_closed_standard_input() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "elasticjob_cli", "validate", "-"],
        preexec_fn=lambda: os.close(0),
        capture_output=True,
        text=True,
        check=False,
    )
    said = "standard input: must be a readable file: it is closed\n"
    assert (ran.returncode, ran.stderr) == (2, said)


def test_endless_file_is_no_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MOST_BYTES", 1 << 20)
    [problem] = manifest.check_file("/dev/zero")
    assert str(problem) == "/dev/zero: must be at most 1 MiB long to be a manifest"


def test_manifest_without_folder_runs_in_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "there" / "job.yaml"
    file.parent.mkdir()
    file.write_text(JOB)
    assert folder_of(str(file)) == file.parent
    assert folder_of("-") == folder_of("/dev/null") == tmp_path
    (tmp_path / "-").write_text(JOB)
    assert prepare("./-", Choice())[1].cwd == tmp_path
