"""Faults of a template against Kubernetes' schema: place, message and hint."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_operator.model import InvalidManifest, parse_manifest
from elasticjob_operator.model.parse import parse_strictly
from elasticjob_operator.model.problems import Problem
from elasticjob_operator.model.template_schema import kubernetes_version, template_problems
from tests.unit.operator.builders import manifest

Json = dict[str, Any]
TRAINER: Json = {"name": "trainer", "image": "t:1", "command": ["python3", "train.py"]}


def problems(spec: Json | None = None, trainer: Json | None = None) -> list[Problem]:
    container = {**TRAINER, **(trainer or {})}
    return template_problems({"spec": {"containers": [container], **(spec or {})}}, ("template",))


def port(**fields: Any) -> Json:
    return {"ports": [fields]}


FAULTS: list[tuple[Json, Json, str, str]] = [
    # fields of the pod, fields of the trainer, path below the template, part of the message
    ({"hostNetwrok": True}, {}, "spec.hostNetwrok", "did you mean hostNetwork?"),
    ({"host_network": True}, {}, "spec.host_network", "did you mean hostNetwork?"),
    ({"HOSTNETWORK": True}, {}, "spec.HOSTNETWORK", "did you mean hostNetwork?"),
    ({"zzz": 1}, {}, "spec.zzz", "there is no such field"),
    ({"workingDir": "/"}, {}, "spec.workingDir", "it belongs to template.spec.containers[]"),
    ({}, {"tolerations": []}, "spec.containers[0].tolerations", "belongs to template.spec"),
    ({}, {"imagee": "x"}, "spec.containers[0].imagee", "did you mean image?"),
    ({}, port(hostport=80, containerPort=80), "spec.containers[0].ports[0].hostport", "hostPort?"),
    ({}, port(name="web"), "spec.containers[0].ports[0].containerPort", "must be set"),
    ({}, port(containerPort="80"), "spec.containers[0].ports[0].containerPort", "out the quotes"),
    ({}, port(containerPort=True), "spec.containers[0].ports[0].containerPort", "got true"),
    ({}, port(containerPort=8.5), "spec.containers[0].ports[0].containerPort", "an integer"),
    ({}, port(containerPort=2**31), "spec.containers[0].ports[0].containerPort", "at most 2147"),
    ({}, {"ports": {"containerPort": 80}}, "spec.containers[0].ports", "must be a list; got a map"),
    ({}, {"ports": ["80"]}, "spec.containers[0].ports[0]", "must be a mapping; got '80'"),
    ({"hostNetwork": "yes"}, {}, "spec.hostNetwork", "must be true or false; got 'yes'"),
    ({"nodeSelector": {"gpu": True}}, {}, "spec.nodeSelector.gpu", "got true: put it in quotes"),
    ({"nodeSelector": {"gpu": None}}, {}, "spec.nodeSelector.gpu", "must be a string; got null"),
    ({"tolerations": [None]}, {}, "spec.tolerations[0]", "must be a mapping; got null"),
    (
        {},
        {"imagePullPolicy": "always"},
        "spec.containers[0].imagePullPolicy",
        "must be one of Always, IfNotPresent, Never; got 'always', did you mean Always?",
    ),
    (
        {},
        {"resources": {"limits": {"memory": "4GB"}}},
        "spec.containers[0].resources.limits.memory",
        "must be a quantity such as 2, 500m or 4Gi; got '4GB'",
    ),
    (
        {},
        {"resources": {"limits": {"cpu": 0.5}}},
        "spec.containers[0].resources.limits.cpu",
        "got 0.5: put it in quotes",
    ),
    (
        {},
        {"livenessProbe": {"httpGet": {"port": [80]}}},
        "spec.containers[0].livenessProbe.httpGet.port",
        "must be an integer or a string; got a list",
    ),
    (
        {"volumes": [{"name": "a"}, {"name": "b"}, {"name": "a"}]},
        {},
        "spec.volumes[2]",
        "must not repeat name 'a'",
    ),
    (
        {},
        {"ports": [{"containerPort": 80}, {"containerPort": 80, "protocol": "TCP"}]},
        "spec.containers[0].ports[1]",
        "must not repeat containerPort 80 and protocol 'TCP'",
    ),
    ({"ephemeralContainers": []}, {}, "spec.ephemeralContainers", "there is no such field"),
]


@pytest.mark.parametrize(("spec", "trainer", "path", "message"), FAULTS)
def test_fault_has_its_path_and_expected_value(
    spec: Json, trainer: Json, path: str, message: str
) -> None:
    [found] = problems(spec, trainer)
    assert found.path == f"template.{path}"
    assert message in found.message
    assert found.message.startswith("must")


VALID: list[tuple[Json, Json]] = [
    ({"nodeSelector": None, "tolerations": None}, {"env": None}),
    ({"terminationGracePeriodSeconds": 60.0}, {}),
    ({"dnsPolicy": ""}, {"imagePullPolicy": ""}),
    ({}, {"livenessProbe": {"httpGet": {"port": "web"}}}),
    ({}, {"livenessProbe": {"httpGet": {"port": 80}}}),
    ({}, {"resources": {"limits": {"cpu": "1.5", "memory": 1e9, "nvidia.com/gpu": 1}}}),
    ({}, {"ports": [{"containerPort": 80}, {"containerPort": 80, "protocol": "UDP"}]}),
    ({"volumes": [{"name": "a", "emptyDir": None}]}, {}),
]


@pytest.mark.parametrize(("spec", "trainer"), VALID)
def test_valid_template_has_no_fault(spec: Json, trainer: Json) -> None:
    assert problems(spec, trainer) == []


def test_metadata_of_generators_is_accepted() -> None:
    metadata = {"name": "x", "creationTimestamp": None, "labels": {"a": "b"}, "annotations": None}
    template = {"metadata": metadata, "spec": {"containers": [TRAINER]}}
    assert template_problems(template, ()) == []
    [found] = template_problems({**template, "metadata": {"finalizers": ["a/b"]}}, ())
    assert found.path == "metadata.finalizers"


def test_schema_names_its_kubernetes() -> None:
    assert kubernetes_version().startswith("1.")


def test_faults_of_models_schema_and_check_are_listed_together() -> None:
    container = {"name": "trainer", "imagee": "x", "env": [{"name": "A", "value": 1}]}
    document = manifest(template={"spec": {"containers": [container]}}, minNodes=0)
    checked: list[str] = []

    def check(job: Any) -> list[Problem]:
        checked.append(job.metadata.name)
        return [Problem.at(("spec", "template", "spec", "x"), "must be checked")]

    with pytest.raises(InvalidManifest) as caught:
        parse_strictly(document, check)
    at = "spec.template.spec.containers[0]"
    assert [problem.path for problem in caught.value.problems] == [
        "spec.minNodes",
        f"{at}.env[0].value",
        f"{at}.command",
        f"{at}.imagee",
    ]
    document["spec"]["template"]["spec"]["containers"][0]["command"] = ["true"]
    with pytest.raises(InvalidManifest) as caught:
        parse_strictly(document, check)
    assert [problem.path for problem in caught.value.problems][-1] == "spec.template.spec.x"
    assert checked == ["job"]


def test_operator_ignores_fields_of_a_newer_kubernetes() -> None:
    document = manifest()
    document["spec"]["template"]["spec"]["newerField"] = 1
    kept = parse_manifest(document).manifest()
    assert kept["spec"]["template"]["spec"]["newerField"] == 1
