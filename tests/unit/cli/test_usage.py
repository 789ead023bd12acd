"""Remedies of usage errors: options of other programs, missing words, scripts as manifests."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from elasticjob_cli.errors import CommandError
from elasticjob_cli.main import application

MANIFEST = """\
apiVersion: elasticjob.dev/v1alpha1
kind: ElasticJob
metadata: {name: good}
spec: {maxNodes: 1, template: {spec: {containers: [{name: trainer, command: ["true"]}]}}}
"""


def said(line: str) -> str:
    """Return the error of a command line, on one line."""
    words = line.split()
    result = CliRunner().invoke(application(words[0]), words)
    if isinstance(result.exception, CommandError):
        return str(result.exception)
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("run --context prod train.py", "run acts on this machine: `elasticjob init` writes"),
        ("run --cluster train.py", "`elasticjob apply` submits it"),
        ("agent --context prod train.py", "agent acts on this machine"),
        ("fault drain job job-0 --context prod", "drain a node with kubectl"),
        ("completion bash --kubeconfig x", "completion acts on this machine"),
        ("apply -k folder", "kubectl kustomize FOLDER | elasticjob apply -f -"),
        ("delete -f job.yaml", "jobs are selected by name, without a manifest"),
        ("get -f job.yaml", "jobs are selected by name, without a manifest"),
        ("logs job -c trainer", "--pod and --rank select"),
        ("logs job --previous", "--round selects an earlier round"),
        ("top --watch", "at a terminal it is repeated until Ctrl-C"),
        ("explain", "Missing argument 'NAME'. `get` lists the jobs."),
        ("logs", "`get` lists the jobs."),
        ("scale --nodes 2", "`get` lists the jobs."),
        ("get one two", "get takes one NAME: remove 'two'"),
        ("doctor digits", "doctor takes no argument: remove 'digits'"),
        ("fault drain job job-0 more", "fault takes FAULT, NAME, POD: remove 'more'"),
        ("init train.py --image=", "--image must be the name of an image, such as"),
        ("apply -n team good.yaml", "Give the manifest with it: `-f good.yaml`."),
        ("apply", "Give the manifest with it: `-f FILE`."),
        ("apply -f -", "`elasticjob run -` runs it on this machine"),
    ],
)
def test_word_of_another_program_is_refused_with_the_remedy(line: str, remedy: str) -> None:
    assert remedy in said(line)


def test_unknown_option_without_a_remedy_is_refused_in_the_same_form() -> None:
    assert said("get --nodes").endswith("No such option: --nodes")


@pytest.mark.parametrize("line", ["validate train.py", "convert train.py"])
def test_script_given_as_a_manifest_names_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\n")
    assert "train.py is a script: `elasticjob init train.py` writes its manifest" in said(line)
    (tmp_path / "train.py").rename(tmp_path / "job.yaml")
    assert "is a script" not in said(line.replace("train.py", "job.yaml"))


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("good.yaml", "not 'good.yaml': `elasticjob run FILE` runs a manifest"),
        ("python3 train.py", "not 'python3'; did you mean `elasticjob init train.py`?"),
        ("notes.txt", "a folder with __main__.py, not 'notes.txt'"),
    ],
)
def test_init_of_another_file_names_the_remedy(words: str, remedy: str) -> None:
    assert remedy in said(f"init {words}")
