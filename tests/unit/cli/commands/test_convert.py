"""`elasticjob convert`: whole manifests against their expected conversions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.main import application
from elasticjob_operator.model.manifest import check_file
from elasticjob_operator.model.parse import parse_manifest

FOLDER = Path(__file__).with_name("pytorchjobs")
SOURCES = sorted(path.name for path in FOLDER.glob("*.yaml"))


def convert(*arguments: str | Path, text: str = "") -> Result:
    words = ["convert", *map(str, arguments)]
    return CliRunner().invoke(application("convert"), words, input=text)


def job(**changes: Any) -> dict[str, Any]:
    """Return a minimal PyTorchJob with a test's changes."""
    container = {"name": "pytorch", "image": "i", "command": ["torchrun", "train.py"]}
    template = {"spec": {"containers": [container]}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "t"},
        "spec": {
            "pytorchReplicaSpecs": {"Worker": {"replicas": 2, "template": template}},
            **changes,
        },
    }


def trainer(document: dict[str, Any]) -> dict[str, Any]:
    worker = document["spec"]["pytorchReplicaSpecs"]["Worker"]
    found: dict[str, Any] = worker["template"]["spec"]["containers"][0]
    return found


def refusal(document: Any) -> str:
    """Return the message about a document that cannot be converted."""
    result = convert("-", text=yaml.safe_dump(document))
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    return result.stderr


def converted(document: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the one job that a document became, and the remarks."""
    result = convert("-", text=yaml.safe_dump(document))
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = yaml.safe_load(result.stdout)
    parse_manifest(found)
    return found, result.stderr


@pytest.mark.parametrize("name", SOURCES)
def test_manifest_is_converted_to_expected_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FOLDER)
    expected = FOLDER / "converted" / name
    scalers = expected.with_suffix(".hpa.yaml")
    options = ["--autoscaler", str(tmp_path / "hpa.yaml")] if scalers.exists() else []
    result = convert(name, "-o", tmp_path / name, *options)
    assert result.exit_code == 0, result.output
    assert (tmp_path / name).read_text() == expected.read_text()
    remarks = result.stderr.replace(str(tmp_path / "hpa.yaml"), "hpa.yaml")
    assert remarks == expected.with_suffix(".remarks").read_text()
    assert check_file(tmp_path / name) == []
    if options:
        assert (tmp_path / "hpa.yaml").read_text() == scalers.read_text()


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"minReplicas": 3, "maxReplicas": 2}, "maxNodes: must be at least minNodes"),
        ({"minReplicas": "two"}, "spec.elasticPolicy.minReplicas: must be a whole number"),
        ({"maxRestarts": -1}, "spec.elasticPolicy.maxRestarts: must be a whole number"),
        ({"rdzvConf": "timeout=3"}, "spec.elasticPolicy.rdzvConf: must be a list"),
        ([], "spec.elasticPolicy: must be a mapping"),
    ],
)
def test_unsupported_policy_is_refused_with_its_field(policy: Any, words: str) -> None:
    assert words in refusal(job(elasticPolicy=policy))


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ({"command": None}, "containers[0].command: must be set: the image's own entry point"),
        ({"command": ["torchrun", "--nnodes=2"]}, "torchrun must be given a script"),
        ({"command": ["deepspeed", "t.py"]}, "deepspeed does not join the job's rendezvous"),
        ({"command": ["mpirun", "python", "t.py"]}, "set spec.maxNodes to 1"),
        ({"name": "Trainer"}, "becomes spec.template.spec.containers[0].name: must be a DNS"),
    ],
)
def test_trainer_that_cannot_be_launched_is_refused(container: Any, words: str) -> None:
    document = job()
    trainer(document).update(container)
    assert words in refusal(document)


def test_abbreviated_options_of_torchrun_become_fields() -> None:
    document = job()
    trainer(document).pop("args", None)
    trainer(document)["command"] = ["torchrun", "--nproc-p=2", "--max-rest", "5", "train.py"]
    spec = converted(document)[0]["spec"]
    assert spec["template"]["spec"]["containers"][0]["command"] == ["python3", "-u", "train.py"]
    assert (spec["nprocPerNode"], spec["maxRestarts"]) == (2, 5)


@pytest.mark.parametrize("launcher", [["torchrun", "--nproc-p=2"], ["python3"]])
def test_option_of_the_script_is_no_abbreviation_of_an_option_of_torchrun(
    launcher: list[str],
) -> None:
    document = job()
    before = converted(document)[0]["spec"].get("maxRestarts")
    trainer(document).pop("args", None)
    trainer(document)["command"] = [*launcher, "train.py", "--max-res", "512"]
    spec = converted(document)[0]["spec"]
    command = spec["template"]["spec"]["containers"][0]["command"]
    assert command[-3:] == ["train.py", "--max-res", "512"]
    assert spec.get("maxRestarts") == before


@pytest.mark.parametrize(
    ("command", "workers"),
    [
        (["bash", "-c", "pip list && torchrun --nproc_per_node=4 t.py"], 4),
        (["torchrun", "--nproc-per-node", "2", "--new-option=1", "t.py"], 2),
        (["accelerate", "launch", "--config_file=c.yaml", "t.py"], "auto"),
        (["bash", "run.sh"], "auto"),
    ],
)
def test_command_with_launcher_is_kept_and_runs_once_per_pod(command: Any, workers: Any) -> None:
    document = job()
    trainer(document).pop("args", None)
    trainer(document)["command"] = command
    result = convert("-", text=yaml.safe_dump(document))
    spec = yaml.safe_load(result.stdout)["spec"]
    assert spec["template"]["spec"]["containers"][0]["command"] == command
    assert spec["nprocPerNode"] == workers
    assert "runs once for each pod" in result.output


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({**job(), "metadata": {"generateName": "t-"}}, "metadata.name: must be set"),
        ({**job(), "metadata": {"name": "t" * 60}}, "becomes metadata.name: must be"),
        ({**job(), "apiVersion": "kubeflow.org/v1beta1"}, "apiVersion: must be kubeflow.org/v1"),
        ({**job(), "kind": "TFJob"}, "kind: must be a PyTorchJob"),
        (job(pytorchReplicaSpecs={}), "pytorchReplicaSpecs: must have a Worker or a Master"),
        (job(pytorchReplicaSpecs={"Chief": {}}), "Chief: must be Master or Worker"),
        (job(pytorchReplicaSpecs={"Worker": {}}), "template.spec: must have containers"),
        (job(nprocPerNode="many"), "spec.nprocPerNode: must be auto, gpu, cpu or a number"),
        (["a", "list"], "must be a mapping"),
    ],
)
def test_invalid_pytorchjob_is_refused(document: Any, words: str) -> None:
    assert words in refusal(document)


def test_trainjob_is_refused_with_the_remedy() -> None:
    said = refusal(
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": "t"},
            "spec": {"runtimeRef": {"name": "torch-distributed"}, "trainer": {"numNodes": 2}},
        }
    )
    assert "its runtime (torch-distributed), which is not in this file" in said
    assert "numNodes as maxNodes" in said


def test_every_problem_of_every_document_is_listed() -> None:
    first, second = job(elasticPolicy=[]), job(nprocPerNode="many")
    text = yaml.safe_dump_all([first, second])
    result = convert("-", text=text)
    assert result.exit_code == 2
    assert [line.split(": ")[1] for line in result.stderr.splitlines()] == [
        "spec.elasticPolicy",
        "spec.nprocPerNode",
    ]


@pytest.mark.parametrize(
    ("policies", "limit", "expected"),
    [
        ("Never", {}, 0),
        ("OnFailure", {}, None),
        ("OnFailure", {"backoffLimit": 7}, 7),
        ("Never", {"backoffLimit": 7}, 7),
    ],
)
def test_restarts_follow_the_replica_policy(
    policies: str, limit: dict[str, int], expected: int | None
) -> None:
    document = job(runPolicy=limit)
    document["spec"]["pytorchReplicaSpecs"]["Worker"]["restartPolicy"] = policies
    assert converted(document)[0]["spec"].get("maxRestarts") == expected


@pytest.mark.parametrize(
    ("told", "variable", "option", "expected"),
    [
        (None, None, None, "auto"),
        ("4", None, None, 4),
        ("4", "2", None, 2),
        ("4", "2", "1", 1),
        (4, None, None, 4),
        (None, "\u00b2", "3", 3),
    ],
)
def test_workers_per_node_match_torchrun(
    told: Any, variable: str | None, option: str | None, expected: Any
) -> None:
    document = job(**({"nprocPerNode": told} if told else {}))
    container = trainer(document)
    if variable:
        container["env"] = [{"name": "PET_NPROC_PER_NODE", "value": variable}]
    if option:
        container["command"] = ["torchrun", "--nproc-per-node", option, "train.py"]
    assert converted(document)[0]["spec"]["nprocPerNode"] == expected


@pytest.mark.parametrize("number", ["\u00b2", "9" * 5000], ids=["a superscript", "too long"])
def test_text_that_is_no_number_is_none(number: str) -> None:
    assert "must be auto, gpu, cpu or a number" in refusal(job(nprocPerNode=number))
    conf = [{"key": "timeout", "value": number}]
    found, remarks = converted(job(elasticPolicy={"maxReplicas": 2, "rdzvConf": conf}))
    assert "joinTimeoutSeconds" not in str(found)
    assert "has no counterpart" in remarks
    document = job()
    trainer(document)["env"] = [{"name": "PET_MAX_RESTARTS", "value": number}]
    assert "maxRestarts" not in converted(document)[0]["spec"]


def test_source_is_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job()))
    result = convert(file, "-o", file)
    assert isinstance(result.exception, BadInput)
    assert "choose another output" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.yaml"], "nowhere.yaml: must be a readable file: No such file"),
        (["-", "--autoscaler", "x.yaml"], "no job in standard input is scaled by metrics"),
    ],
)
def test_invalid_arguments_are_reported(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = convert(*arguments, text=yaml.safe_dump(job()))
    assert isinstance(result.exception, BadInput)
    assert words in str(result.exception)


def test_file_without_job_and_file_without_yaml_are_refused() -> None:
    result = convert("-", text="apiVersion: v1\nkind: ConfigMap\n")
    assert isinstance(result.exception, BadInput)
    assert "contains no PyTorchJob" in str(result.exception)
    result = convert("-", text="a: [")
    assert result.exit_code == 2
    assert "must be YAML" in result.stderr


def test_unwritable_output_is_an_error(tmp_path: Path) -> None:
    result = convert("-", "-o", tmp_path / "no" / "job.yaml", text=yaml.safe_dump(job()))
    assert isinstance(result.exception, CommandError)
    assert "cannot be written" in str(result.exception)


def test_autoscaler_output_is_reported_once(tmp_path: Path) -> None:
    elastic = {"minReplicas": 1, "maxReplicas": 4, "metrics": [{"type": "Resource"}]}
    document = job(elasticPolicy=elastic)
    document["metadata"]["labels"] = {"note": "write one with --autoscaler FILE"}
    text = yaml.safe_dump(document)
    unwritten = convert("-", text=text)
    assert "scales the ElasticJob: write one with --autoscaler FILE\n" in unwritten.stderr
    file = tmp_path / "hpa.yaml"
    written = convert("-", "--autoscaler", file, text=text)
    assert f"scales the ElasticJob: written to {file}\n" in written.stderr
    assert "--autoscaler" not in written.stderr
    assert unwritten.stdout == written.stdout
