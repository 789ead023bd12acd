"""Trainer container as a process: command, environment, folder, and their errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.local import container, etcd
from elasticjob_cli.local.container import interpreter, trainer, with_nested_launch
from elasticjob_cli.local.kubelet import PodFiles
from elasticjob_cli.local.programs import PodPrograms
from elasticjob_operator.domain.launch.preparation import REPORT
from elasticjob_operator.domain.launch.variables import expanded
from elasticjob_operator.model import ElasticJob, Launch, parse_manifest
from tests.unit.full_disk import room

PATH = {"PATH": "/usr/bin:/bin"}


def job(**container: Any) -> ElasticJob:
    fields = {"name": "trainer", "command": ["sh", "-c", "true"], **container}
    return parse_manifest(
        {
            "apiVersion": "elasticjob.dev/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": "job"},
            "spec": {"maxNodes": 2, "template": {"spec": {"containers": [fields]}}},
        }
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$(A)-$(B)", "one-two"),
        ("$(MISSING)", "$(MISSING)"),
        ("$$(A)", "$(A)"),
        ("$A ${A}", "$A ${A}"),
        ("$$$(A)", "$one"),
    ],
)
def test_references_are_expanded_as_in_kubernetes(text: str, value: str) -> None:
    assert expanded(text, {"A": "one", "B": "two"}) == value


def test_command_args_and_env_come_from_the_container(tmp_path: Path) -> None:
    env = [
        {"name": "A", "value": "1"},
        {"name": "B", "value": "$(A)2"},
        {"name": "PATH", "value": "/bin"},
    ]
    found = trainer(
        job(command=["sh", "-c"], args=["echo $(B)"], env=env), tmp_path, PATH, sys.executable
    )
    assert found.argv == ("sh", "-c", "echo 12")
    assert (found.env["A"], found.env["B"], found.env["PATH"]) == ("1", "12", "/bin")
    assert found.cwd == tmp_path
    assert found.interpreter == sys.executable  # a shell cannot run the launcher


def test_launcher_runs_on_python_of_the_command(tmp_path: Path) -> None:
    found = trainer(job(command=[sys.executable, "-m", "x"]), tmp_path, PATH, "/other")
    assert found.interpreter == sys.executable


@pytest.mark.parametrize(
    ("container", "complaint"),
    [
        ({"env": [{"name": "A=B", "value": "x"}]}, "env: a name must not be empty or contain '='"),
        ({"env": [{"name": "A", "value": "a\0b"}]}, "env A must not contain NUL"),
        ({"command": ["sh", "a\0b"]}, "command must not contain NUL"),
    ],
)
def test_value_that_no_process_can_receive_is_refused(
    container: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=complaint):
        trainer(job(**container), tmp_path, PATH, sys.executable)


def test_env_that_needs_a_cluster_is_unresolved_unless_given(tmp_path: Path) -> None:
    secret = {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    found = trainer(job(env=[secret]), tmp_path, PATH, sys.executable)
    assert found.unresolved == ("TOKEN",)
    given = trainer(job(env=[secret]), tmp_path, {**PATH, "TOKEN": "t"}, sys.executable)
    assert (given.unresolved, given.env["TOKEN"]) == ((), "t")


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (["nowhere.py"], True),
        (["-u", "-W", "ignore", "nowhere.py"], True),
        (["-m", "nowhere"], False),
        (["-um", "nowhere"], False),
        (["-c", "pass"], False),
        (["-"], False),
        (["there.py", "nowhere.py"], False),
    ],
)
def test_missing_script_is_refused(tmp_path: Path, arguments: list[str], missing: bool) -> None:
    (tmp_path / "there.py").touch()
    wanted = job(command=[sys.executable, *arguments])
    if missing:
        with pytest.raises(BadInput, match=r"the script 'nowhere.py' does not exist in"):
            trainer(wanted, tmp_path, PATH, sys.executable)
    else:
        trainer(wanted, tmp_path, PATH, sys.executable)


@pytest.mark.parametrize(
    ("container", "message"),
    [
        ({"command": ["no-such"]}, "'no-such' is not on PATH"),
        ({"command": ["./no-such"]}, "no-such does not exist"),
        ({"command": ["./plain"]}, "plain is not executable: run `chmod"),
        ({"command": ["./folder"]}, "folder is a folder"),
        ({"command": [sys.executable, "folder"]}, "'folder' is a folder without a __main__.py"),
        ({"workingDir": "gone"}, "workingDir must exist on this machine: .*gone does not"),
        ({"workingDir": "plain"}, "workingDir must exist on this machine: .*plain is not a folder"),
    ],
)
def test_command_that_cannot_start_is_refused(
    tmp_path: Path, container: dict[str, Any], message: str
) -> None:
    (tmp_path / "plain").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(BadInput, match=message):
        trainer(job(**container), tmp_path, PATH, sys.executable)


def test_working_dir_is_relative_to_the_manifest(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    assert trainer(job(workingDir="inner"), tmp_path, PATH, "x").cwd == tmp_path / "inner"


@pytest.mark.parametrize(
    ("asked", "command", "workers", "counted"),
    [
        (3, "python3 train.py", "3", None),
        ("auto", "python3 train.py", "launcher", "auto"),
        (None, "python3 train.py", "launcher", "accelerators"),
        (None, "torchrun --nproc-per-node=2 train.py", "2", None),
        (None, "torchrun --nproc-per-node=$(N) train.py", "5", None),
        (None, "torchrun --nproc-per-node=$(WORD) train.py", "launcher", "cpu"),
        (None, "torchrun --nproc-per-node=$(ABSENT) train.py", "launcher", "$(ABSENT)"),
    ],
)
def test_workers_per_node_match_a_pod(
    asked: Any, command: str, workers: str, counted: str | None, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    env = [{"name": "N", "value": "5"}, {"name": "WORD", "value": "cpu"}]
    made = job(command=command.split(), env=env)
    made = made.model_copy(update={"spec": made.spec.model_copy(update={"nproc_per_node": asked})})
    run = trainer(made, tmp_path, PATH, sys.executable)
    files = PodFiles("job-0", "uid", 1, tmp_path / "sock", tmp_path / "logs")
    programs = PodPrograms(made, run, {}, tmp_path, "127.0.0.1:1", tmp_path / "claims")
    assert programs.agent(files).env["ELASTICJOB_SLOTS"] == workers
    assert programs.launcher(files).env.get("ELASTICJOB_NPROC") == counted


def test_missing_room_for_the_files_of_the_run_is_reported(tmp_path: Path) -> None:
    made = job(command=["python3", "-c", ""])
    run = trainer(made, tmp_path, PATH, sys.executable)
    programs = PodPrograms(made, run, {}, tmp_path, "127.0.0.1:1", tmp_path / "claims")
    with room(1000), pytest.raises(CommandError) as refused:
        programs.build()
    assert str(refused.value).startswith(f"the files of the run cannot be written: {tmp_path}: ")
    assert str(refused.value).endswith("set TMPDIR to a folder with more")


def test_torchrun_is_unwrapped_as_in_a_pod(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "python3").symlink_to(sys.executable)
    path = {"PATH": str(tmp_path)}  # without torchrun
    found = trainer(job(command=["torchrun", "train.py", "--lr=1"]), tmp_path, path, "/other")
    assert found.argv == ("python3", "-u", "train.py", "--lr=1")
    assert found.interpreter == str(tmp_path / "python3")
    assert found.note == (
        "launch PerWorker: torchrun was taken out: the job itself starts the workers"
    )


def test_launcher_in_a_shell_line_runs_once_per_pod(tmp_path: Path) -> None:
    command = ["sh", "-c", "torchrun train.py"]
    found = trainer(job(command=command), tmp_path, PATH, sys.executable)
    assert (found.argv, found.options, found.launch) == (tuple(command), (), Launch.PER_NODE)
    assert found.note == "launch PerNode: torchrun inside of sh starts the workers itself"


def test_preparation_becomes_an_option_of_the_launcher(tmp_path: Path) -> None:
    found = trainer(job(command=["sh", "-c", "cd /; train"]), tmp_path, PATH, sys.executable)
    assert found.options == ("--prepare", "--check", "--program", "train")
    assert found.argv[2] == f"cd /; {REPORT} train"


def test_unknown_launcher_for_several_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="deepspeed does not join the job's rendezvous"):
        trainer(job(command=["deepspeed", "t.py"]), tmp_path, PATH, sys.executable)


# -- another interpreter ------------------------------------------------------------


def odd_python(folder: Path, name: str = "snake") -> Path:
    (folder / name).symlink_to(sys.executable)
    return folder / name


@pytest.mark.parametrize("named", ["python", "python3", "python3.9", "/opt/conda/bin/python"])
def test_named_interpreter_runs_the_script(tmp_path: Path, named: str) -> None:
    """The command's name for Python and the interpreter's own name do not matter."""
    snake = odd_python(tmp_path)
    wanted = job(command=[named, "-c", "pass"])
    found = trainer(wanted, tmp_path, PATH, "/other", interpreter(str(snake)))
    assert found.argv == (str(snake), "-c", "pass")
    assert found.interpreter == str(snake)


def test_shell_that_resolves_another_python_is_refused(tmp_path: Path) -> None:
    snake = odd_python(tmp_path)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    other = tmp_path / "other"
    other.mkdir()
    odd_python(other, "python3")
    shell = job(command=["sh", "-c", "python3 train.py"])
    with pytest.raises(BadInput, match=r"the job's command is sh, for which python3 is .*/other/"):
        trainer(shell, tmp_path, {"PATH": f"{tmp_path}:{other}:/bin"}, "/other", snake)
    odd_python(tmp_path, "python3")
    assert trainer(shell, tmp_path, path, "/other", snake).argv[0] == "sh"
    silent = job(command=["sh", "-c", "./train.sh"])
    (tmp_path / "python3").unlink()
    assert trainer(silent, tmp_path, path, "/other", snake).argv[0] == "sh"


def test_program_that_is_no_interpreter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\necho no snake >&2\n")
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho python 3 7\n")
    broken = tmp_path / "broken"
    broken.write_text("no program at all")
    (tmp_path / "file").touch()
    for program in (script, old, broken):
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for given, said in [
        (script, f"{script} does not run Python code: no snake"),
        (old, f"must be Python 3.8 or later: {old} is 3.7"),
        (broken, "Exec format error"),
        (tmp_path / "file", "file is not executable"),
        (tmp_path, f"is a folder; did you mean {tmp_path}/bin/python"),
        (tmp_path / "gone", "gone does not exist"),
        ("gone", "gone is not on PATH"),
    ]:
        with pytest.raises(BadInput) as refused:
            interpreter(str(given))
        assert str(refused.value).startswith("--python must be")
        assert said in str(refused.value)
    odd_python(tmp_path)
    assert interpreter("snake") == tmp_path / "snake"


STARTS = "import subprocess\nsubprocess.run(['torchrun', 'test.py'])\n"
DEEPSPEED = STARTS.replace("torchrun", "deepspeed")
NOTEBOOK = "from accelerate import notebook_launcher\nnotebook_launcher(main, (), 2)\n"


@pytest.mark.parametrize(
    ("source", "nodes", "found"),
    [
        (STARTS, 2, "train.py, line 2 starts torchrun"),
        (f"import torch\n{STARTS}", 2, ""),
        (f"import torch\n{STARTS}", 1, ""),
        (NOTEBOOK, 1, "train.py, line 2 starts notebook_launcher"),
        (NOTEBOOK, 2, ""),
        (DEEPSPEED, 1, "train.py, line 2 starts deepspeed"),
        (f"import torch\n{DEEPSPEED}", 1, ""),
    ],
    ids=[
        *("only starts", "may train besides", "may train besides on one node"),
        *("its function on one node", "its function on several nodes"),
        *("another launcher on one node", "another launcher, may train besides"),
    ],
)
def test_program_that_may_train_besides_is_left_to_its_pods(
    tmp_path: Path, source: str, nodes: int, found: str
) -> None:
    (tmp_path / "train.py").write_text(source)
    container = {"name": "trainer", "command": ["python3", "train.py"]}
    document = job(**container).manifest()
    document["spec"] |= {"maxNodes": nodes, "nodes": nodes, "nprocPerNode": 2}
    given = with_nested_launch(parse_manifest(document), tmp_path, PATH)
    decided = trainer(given, tmp_path, PATH, sys.executable)
    assert decided.launch is (Launch.PER_NODE if found else Launch.PER_WORKER)
    assert found in decided.note
    assert ("--check" in decided.options) is (not found)  # the pod decides


@pytest.mark.parametrize("imported", ["", "import torch\n"], ids=["only starts", "may train"])
def test_program_with_a_rendezvous_of_its_own_is_refused_for_several_nodes(
    tmp_path: Path, imported: str
) -> None:
    (tmp_path / "train.py").write_text(imported + DEEPSPEED)
    with pytest.raises(BadInput, match="starts deepspeed, which does not join the job's"):
        with_nested_launch(job(command=["python3", "train.py"]), tmp_path, PATH)


@pytest.mark.parametrize("annotations", [None, {"team": "a"}])
def test_launch_found_in_a_program_is_read_from_no_manifest(
    tmp_path: Path, annotations: dict[str, str] | None
) -> None:
    """Annotations of a running job may change on a cluster, and a program since its last run."""
    (tmp_path / "train.py").write_text(STARTS)
    found = with_nested_launch(job(command=["python3", "train.py"]), tmp_path, PATH)
    document = found.manifest()
    document["metadata"]["annotations"] |= annotations or {}
    (tmp_path / "train.py").write_text("import torch\n")
    again = parse_manifest(document)
    assert again.metadata.annotations == annotations
    decided = trainer(with_nested_launch(again, tmp_path, PATH), tmp_path, PATH, sys.executable)
    assert decided.launch is Launch.PER_WORKER


def test_program_without_an_answer_is_reported_without_text_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = tmp_path / "bin" / "etcd"
    silent.parent.mkdir()
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setenv("PATH", f"{silent.parent}:/usr/bin:/bin")
    monkeypatch.setattr(container, "VERSION_SECONDS", 0.2)
    monkeypatch.setattr(etcd, "HELP_SECONDS", 0.2)
    reason = r"no answer within 0\.2 s, which a busy machine can cause: try again$"
    with pytest.raises(
        BadInput, match=f"^--python must be a Python interpreter: {silent}: {reason}"
    ):
        interpreter(str(silent))
    with pytest.raises(CommandError, match=rf"^etcd \({silent}\) cannot be run: {reason}"):
        etcd.find_etcd(v2=True)
