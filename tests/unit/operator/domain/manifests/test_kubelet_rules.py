"""Rules of the kubelet: pods that would be created and never start."""

from __future__ import annotations

from typing import Any

import pytest

from elasticjob_operator.domain.manifests.pod_rules.kubelet import image_name_fault
from tests.unit.operator.domain.manifests.test_template_check import POD, found

Json = dict[str, Any]
AT = f"{POD}.containers[0]"
HEX = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    "reference",
    [
        "t",
        "t:1",
        "team/t:v1.0_a-b",
        "registry.example.com/team/t",
        "registry.example.com:5000/t:1",
        "Registry.example.com/t",
        "REGISTRY/t:1",
        "localhost/t",
        "localhost:5000/t",
        "[2001:db8::1]:5000/t:1",
        "10.0.0.1:5000/a/b/c",
        f"t@sha256:{HEX}",
        f"ghcr.io/a/t:1@sha256:{HEX}",
        f"t@sha512:{HEX}{HEX}",
        f"t@multihash+base58:{HEX}",
        "a__b/c---d/e.f",
        "123456789012.dkr.ecr.us-east-1.amazonaws.com/t:1",
        f"team/{HEX}",
        "t:" + "a" * 128,
    ],
)
def test_valid_image_reference(reference: str) -> None:
    assert image_name_fault(reference) is None


@pytest.mark.parametrize(
    ("reference", "part"),
    [
        ("Team/T:1", "repository 'T'"),
        ("team/T", "repository 'team/T'"),
        ("MyImage", "repository 'MyImage'"),
        ("t:", "tag ''"),
        ("t:1:2", "tag '1:2'"),
        ("t:-1", "tag '-1'"),
        ("t:" + "a" * 129, "tag "),
        ("t:a b", "tag 'a b'"),
        ("https://ghcr.io/a/t", "registry 'https:'"),
        ("ghcr.io//t", "repository '/t'"),
        ("ghcr.io/t/", "repository 't/'"),
        ("a___b", "repository 'a___b'"),
        ("-t", "repository '-t'"),
        ("t..u", "repository 't..u'"),
        ("$(IMAGE)", "repository '$(IMAGE)'"),
        ("{{ .Values.image }}", "repository"),
        ("<image>", "repository '<image>'"),
        ("t@sha256:abc", "digest 'sha256:abc'"),
        (f"t@sha256:{HEX}0", "digest"),
        ("t@", "digest ''"),
        (HEX, "repository"),
        ("a/" * 127 + "aa", "name"),
        ("ghcr.io:port/t", "registry 'ghcr.io:port'"),
        ("é", "repository"),
        ("t:é", "tag"),
    ],
)
def test_invalid_image_reference_names_its_part(reference: str, part: str) -> None:
    fault = image_name_fault(reference)
    assert fault is not None
    assert fault.startswith(part)


def test_images_of_all_containers_and_volumes_are_checked() -> None:
    spec = {
        "initContainers": [{"name": "a", "image": "A"}],
        "volumes": [{"name": "v", "image": {"reference": "t:"}}],
    }
    assert set(found(spec, {"image": "https://x/t"})) == {
        f"{AT}.image",
        f"{POD}.initContainers[0].image",
        f"{POD}.volumes[0].image.reference",
    }


@pytest.mark.parametrize(
    ("pod", "own", "path"),
    [
        ({"runAsNonRoot": True}, {"runAsUser": 0}, f"{AT}.securityContext.runAsUser"),
        ({"runAsUser": 0}, {"runAsNonRoot": True}, f"{POD}.securityContext.runAsUser"),
        ({"runAsUser": 0, "runAsNonRoot": True}, {}, f"{POD}.securityContext.runAsUser"),
        ({"runAsUser": 0, "runAsNonRoot": True}, {"runAsUser": 5}, None),
        ({"runAsUser": 0, "runAsNonRoot": True}, {"runAsNonRoot": False}, None),
        ({"runAsUser": 0}, {}, None),
        ({"runAsNonRoot": True}, {}, None),
    ],
)
def test_root_that_must_not_be_root_is_refused(pod: Json, own: Json, path: str | None) -> None:
    problems = found({"securityContext": pod}, {"securityContext": own})
    assert list(problems) == ([path] if path else [])
    assert path is None or problems[path] == "must not be 0 with securityContext.runAsNonRoot: true"


@pytest.mark.parametrize(("folder", "valid"), [("/w", True), ("", True), ("w", False)])
def test_working_directory_must_be_absolute(folder: str, valid: bool) -> None:
    assert list(found(None, {"workingDir": folder})) == ([] if valid else [f"{AT}.workingDir"])


@pytest.mark.parametrize(
    ("medium", "pages", "valid"),
    [
        ("", [], True),
        ("Memory", [], True),
        ("memory", [], False),
        ("Disk", [], False),
        ("HugePages", [], False),
        ("HugePages", ["2Mi"], True),
        ("HugePages", ["2Mi", "1Gi"], False),
        ("HugePages-", ["2Mi"], False),
        ("HugePages-2Mi", ["2Mi", "1Gi"], True),
        ("HugePages-1Gi", ["2Mi"], False),
    ],
)
def test_medium_must_be_one_that_the_kubelet_mounts(
    medium: str, pages: list[str], valid: bool
) -> None:
    amounts = {f"hugepages-{size}": "2Gi" for size in pages}
    resources = {"limits": {"memory": "1Gi", "cpu": "1", **amounts}} if amounts else {}
    spec = {"volumes": [{"name": "v", "emptyDir": {"medium": medium, "sizeLimit": "1Gi"}}]}
    path = f"{POD}.volumes[0].emptyDir.medium"
    assert list(found(spec, {"resources": resources})) == ([] if valid else [path])
