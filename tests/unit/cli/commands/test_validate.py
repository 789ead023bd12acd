"""`elasticjob validate`: every error of the template with file, line and path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elasticjob_cli.main import application
from elasticjob_operator.domain.manifests.template_warnings import WarningKind
from elasticjob_operator.model import ElasticJob
from tests.unit.operator.domain.manifests.test_template_warnings import FIRING, SILENT

JOB = """\
apiVersion: elasticjob.dev/v1alpha1
kind: ElasticJob
metadata: {name: good}
spec:
  maxNodes: 4
  template:
    spec:
      containers:
        - name: trainer
          image: trainer:1
          command: [python3, train.py]
"""
FAULTY = """\
apiVersion: elasticjob.dev/v1alpha1
kind: ElasticJob
metadata: {name: good}
spec:
  maxNodes: 4
  template:
    spec:
      hostNetwrok: true
      containers:
        - name: trainer
          command: [python3, train.py]
          resources: {limits: {cpu: 1}, requests: {cpu: 2}}
          volumeMounts:
            - name: data
              mountPath: /data
      volumes:
        - name: elasticjob
"""
PATH = "spec.template.spec"
ERRORS = [
    f"8:20: {PATH}.hostNetwrok: must not be set: there is no such field; did you mean hostNetwork?",
    f"10:11: {PATH}.containers[0].image: must be set",
    f"12:57: {PATH}.containers[0].resources.requests.cpu: must be at most the limit of 1; got 2",
    f"14:21: {PATH}.containers[0].volumeMounts[0].name: must be the name of a volume; got 'data', "
    "volumes are: elasticjob",
    f"17:17: {PATH}.volumes[0].name: must not be elasticjob: this volume is added to the pod",
]


def test_valid_manifest_is_valid(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    ran = CliRunner().invoke(application("validate"), ["validate", str(file)])
    launch = "  good: launch PerWorker (PlainCommand): the command is run once for each worker\n"
    assert (ran.exit_code, ran.stdout) == (0, f"{file}: valid\n{launch}")


def test_every_error_of_template_has_its_line_and_path(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(FAULTY)
    ran = CliRunner().invoke(application("validate"), ["validate", str(file)])
    assert ran.exit_code == 2
    assert ran.stderr.splitlines() == [f"{file}:{error}" for error in ERRORS]


def test_setup_that_needs_a_shell_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    for setup, reason in (
        ("[pip install -r r.txt]", "the program 'pip install -r r.txt' contains spaces"),
        ("[cd, /app]", "cd is a command of a shell, not a program"),
        ("[bash, -c]", "bash is given no script and no line after -c"),
    ):
        file.write_text(JOB.replace("  template:", f"  setup: {setup}\n  template:"))
        ran = CliRunner().invoke(application("validate"), ["validate", str(file)])
        assert ran.exit_code == 2
        assert f"{file}:6:3: spec.setup: {reason}" in ran.stderr


def test_setup_by_a_command_of_find_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    setup = '["find", "/cache", "-name", "*.lock", "-exec", "rm", "{}", ";"]'
    file.write_text(JOB.replace("  template:", f"  setup: {setup}\n  template:"))
    ran = CliRunner().invoke(application("validate"), ["validate", str(file)])
    assert ran.exit_code == 0, ran.stderr


@pytest.mark.parametrize(("a_job", "kind", "path"), FIRING, ids=lambda value: str(value)[:40])
def test_strict_validation_fails_for_each_kind_of_warning(
    tmp_path: Path, a_job: ElasticJob, kind: WarningKind, path: str
) -> None:
    file = manifest(tmp_path, a_job)
    for options, code in (((), 0), (("--strict",), 3)):
        ran = CliRunner().invoke(application("validate"), ["validate", *options, str(file)])
        assert ran.exit_code == code, ran.stderr
        [warning] = [line for line in ran.stderr.splitlines() if "warning" in line]
        assert f": {path}: warning ({kind}): " in warning


@pytest.mark.parametrize("a_job", SILENT, ids=lambda one: str(one.spec.template.spec)[:60])
def test_strict_validation_of_an_ordinary_template_succeeds(
    tmp_path: Path, a_job: ElasticJob
) -> None:
    file = manifest(tmp_path, a_job)
    ran = CliRunner().invoke(application("validate"), ["validate", "--strict", str(file)])
    assert (ran.exit_code, ran.stderr) == (0, "")


def manifest(folder: Path, a_job: ElasticJob) -> Path:
    document = a_job.manifest()
    document["metadata"] = {"name": a_job.metadata.name}
    document.pop("status", None)
    file = folder / "job.yaml"
    file.write_text(json.dumps(document))
    return file


@pytest.mark.parametrize(
    ("source", "launch", "code"),
    [
        ("import os\nos.system('deepspeed t.py')\n", "Auto", 3),
        ("import os\nos.system('torchrun t.py')\n", "Auto", 0),
        ("import os\nos.system('torchrun t.py')\n", "PerNode", 0),
        ("import os\nos.system('torchrun t.py')\n", "PerWorker", 0),
        ("import torch\n", "Auto", 0),
    ],
)
def test_strict_validation_fails_for_a_launcher_that_reaches_no_other_node(
    tmp_path: Path, source: str, launch: str, code: int
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB.replace("maxNodes: 4", f"maxNodes: 4\n  launch: {launch}"))
    (tmp_path / "train.py").write_text(source)
    ran = CliRunner().invoke(application("validate"), ["validate", "--strict", str(file)])
    assert ran.exit_code == code, ran.stderr
    told = "train.py, line 2 starts deepspeed, which does not join the job's rendezvous"
    assert (told in ran.stderr) == bool(code)


STARTS = "import subprocess\nsubprocess.run(['torchrun', 'test.py'])\n"


@pytest.mark.parametrize(
    ("source", "changes", "warned"),
    [
        (f"import torch\n{STARTS}", "  nprocPerNode: 2\n", True),
        (f"import torch\n{STARTS}", "  nprocPerNode: 2\n  launch: PerNode\n", False),
        (f"import torch\n{STARTS}", "  nprocPerNode: 2\n  launch: PerWorker\n", False),
        (STARTS, "  nprocPerNode: 2\n", False),
        ("import torch\n", "  nprocPerNode: 2\n", False),
    ],
    ids=["may train besides", "per node", "per worker", "only starts", "only trains"],
)
def test_strict_validation_fails_for_a_program_that_may_train_besides(
    tmp_path: Path, source: str, changes: str, warned: bool
) -> None:
    (tmp_path / "train.py").write_text(source)
    file = tmp_path / "job.yaml"
    file.write_text(JOB.replace("spec:\n  max", f"spec:\n{changes}  max"))
    result = CliRunner().invoke(application("validate"), ["validate", "--strict", str(file)])
    said = "spec.launch: warning (ProgramStartsLauncher): train.py, line 3 starts torchrun, and"
    assert (said in result.output) is warned, result.output
    assert ("the program may train besides" in result.output) is warned
    assert ("ProgramStartsLauncher" in result.output) is warned


LONG = f", {120_000 * 'x'}"
CONFIG = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: c}\n---\n"


def test_object_beside_a_job_is_named_and_not_checked(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(CONFIG + JOB)
    ran = CliRunner().invoke(application("validate"), ["validate", "--strict", str(file)])
    assert ran.exit_code == 0, ran.output
    assert (
        f"{file}:2:7: kind: ConfigMap of v1 is not checked: it is not an ElasticJob" in ran.output
    )
    assert f"{file}: valid" in ran.output


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("{name: good}", "{name: good, labels: {a: b c}}", "metadata.labels.a: must be a label"),
        ("{name: good}", "{name: good, annotations: {a b: c}}", "metadata.annotations.a b: must"),
        (
            "[python3, train.py]",
            "[\u201cpython3\u201d, train.py]",
            "has a quote or a dash of typography",
        ),
        (
            "[python3, train.py]",
            "[python3, train.py, \u2013-lr]",
            "has a quote or a dash of typography",
        ),
        (
            "train.py]",
            f"train.py{LONG * 14}]",
            "must be at most 1572864 bytes long",
        ),
        ("    spec:\n", "    spec:\n      overhead: {cpu: 100m}\n", "overhead: must be absent"),
    ],
    ids=["label", "annotation", "quote", "dash", "size", "overhead"],
)
def test_job_that_the_cluster_would_refuse_is_invalid(
    tmp_path: Path, old: str, new: str, problem: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB.replace(old, new), encoding="utf-8")
    ran = CliRunner().invoke(application("validate"), ["validate", str(file)])
    assert ran.exit_code == 2, ran.output[:2000]
    assert problem in ran.output
