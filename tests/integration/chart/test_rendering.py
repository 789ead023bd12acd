"""Rendered chart, for many values: labelled, restricted, bounded, complete."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.places import KUBERNETES_VERSION
from tests.integration.helm_chart import (
    CHART,
    EXTERNAL,
    MATRIX,
    NAMESPACE,
    RELEASE,
    HelmRefused,
    Json,
    Rendered,
    helm,
    pod_template,
    render,
)


@pytest.fixture(scope="module", params=MATRIX, ids=lambda name: name.replace(" ", "-"))
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render(MATRIX[request.param])


def test_lint_reports_nothing() -> None:
    helm("lint", "--strict", str(CHART), "--kube-version", "1.36.3")


def test_objects_have_labels_and_namespace(rendered: Rendered) -> None:
    seen = set()
    for found in rendered.objects:
        metadata, kind = found["metadata"], found["kind"]
        labels = metadata["labels"]
        assert labels["app.kubernetes.io/name"] == "elasticjob"
        assert labels["app.kubernetes.io/instance"] == RELEASE
        assert labels["app.kubernetes.io/part-of"] == "elasticjob"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert labels["app.kubernetes.io/version"] == "0.1.0"
        assert labels["app.kubernetes.io/component"]
        assert labels["helm.sh/chart"] == "elasticjob-0.1.0"
        clusterwide = kind.startswith(("Cluster", "Validating", "CustomResource"))
        assert ("namespace" in metadata) != clusterwide, metadata
        place = (kind, metadata.get("namespace"), metadata["name"])
        assert place not in seen
        seen.add(place)


def test_python_programs_have_five_minutes_to_start(rendered: Rendered) -> None:
    """On an overloaded node their imports take minutes, and each restart begins again.

    A probe without an answer takes its whole timeout, so a hang is noticed later.
    """
    found = 0
    for name, pod in rendered.pods():
        for container in pod["spec"]["containers"]:
            if "livenessProbe" not in container or container["name"] == "etcd":
                continue
            found += 1
            startup = container["startupProbe"]
            assert startup["httpGet"] == container["livenessProbe"]["httpGet"], name
            assert startup["periodSeconds"] * startup["failureThreshold"] >= 300, name
            unanswered = max(startup["periodSeconds"], startup["timeoutSeconds"])
            assert unanswered * startup["failureThreshold"] <= 600, name
    assert found > 0


def test_pod_labels_do_not_depend_on_version(rendered: Rendered) -> None:
    for name, pod in rendered.pods():
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & pod["metadata"]["labels"].keys()
        assert pod["metadata"]["labels"]["app.kubernetes.io/part-of"] == "elasticjob", name


def test_no_chart_object_matches_job_pod_labels(rendered: Rendered) -> None:
    for name, pod in rendered.pods():
        assert not any(
            label.startswith("elasticjob.dev/") for label in pod["metadata"]["labels"]
        ), name


def test_pods_satisfy_restricted_profile(rendered: Rendered) -> None:
    for name, pod in rendered.pods():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["enableServiceLinks"] is False, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        assert not any("hostPath" in volume for volume in spec.get("volumes", ())), name
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name


NOTES = """apiVersion: v1
kind: ConfigMap
metadata: {name: notes}
data: {notes: {{ include "elasticjob/templates/NOTES.txt" . | toJson }}}
"""


@pytest.fixture(scope="module")
def chart_with_notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the chart that renders its notes into a ConfigMap, which helm prints."""
    copy = tmp_path_factory.mktemp("notes") / "elasticjob"
    shutil.copytree(CHART, copy)
    (copy / "templates" / "notes.yaml").write_text(NOTES)
    return copy


def notes_of(
    chart: Path, values: dict[str, Any], kubernetes: str
) -> tuple[str, list[dict[str, Any]]]:
    """Return the notes and the objects of a chart with notes."""
    words = ("template", RELEASE, str(chart), "--namespace", NAMESPACE)
    rendered = helm(*words, "--kube-version", kubernetes, values=values)
    objects = [one for one in yaml.safe_load_all(rendered) if one]
    (notes,) = [one["data"]["notes"] for one in objects if one["metadata"]["name"] == "notes"]
    return notes, objects


@pytest.mark.parametrize("secret", ["", "tls"])
def test_notes_recommend_kubectl_for_a_dashboard_without_certificate(
    chart_with_notes: Path, secret: str
) -> None:
    page = {"enabled": True, "tls": {"secretName": secret}}
    values = {"dashboard": page, "crds": {"install": False}}
    notes, _ = notes_of(chart_with_notes, values, KUBERNETES_VERSION)
    assert ("\n  kubectl elasticjob dashboard\n" in notes) is (secret == "")
    assert ("close the page before you end it" in notes) is (secret == "")


@pytest.mark.parametrize(
    ("kubernetes", "warned"),
    [
        ("v1.29.0", True),
        ("v1.29.14-gke.1", True),
        ("v1.30.0-beta.0", False),
        ("v1.30.0", False),
        (KUBERNETES_VERSION, False),
    ],
)
def test_notes_warn_of_kubernetes_without_admission_policies(
    chart_with_notes: Path, kubernetes: str, warned: bool
) -> None:
    values = {"crds": {"install": False}}
    notes, objects = notes_of(chart_with_notes, values, kubernetes)
    assert ("has no admission policies, which need 1.30" in notes) is warned
    policies = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    assert bool(policies & {one["kind"] for one in objects}) is not warned


def test_images_are_pinned_and_resources_are_limited(rendered: Rendered) -> None:
    for name, pod in rendered.pods():
        for container in pod["spec"]["containers"]:
            tag = container["image"].rpartition(":")[2]
            assert re.fullmatch(r"v?\d+\.\d+\.\d+", tag), name
            assert {"cpu", "memory"} <= container["resources"]["requests"].keys(), name
            assert "memory" in container["resources"]["limits"], name


def test_mounts_and_volumes_match(rendered: Rendered) -> None:
    for found in rendered.objects:
        if found["kind"] not in ("Deployment", "StatefulSet"):
            continue
        spec = pod_template(found)["spec"]
        claims = found["spec"].get("volumeClaimTemplates", ())
        volumes = {v["name"] for v in spec.get("volumes", ())} | {
            claim["metadata"]["name"] for claim in claims
        }
        mounted = (*spec.get("initContainers", ()), *spec["containers"])
        assert volumes == {m["name"] for c in mounted for m in c["volumeMounts"]}


def test_selectors_match_their_own_pods_only(rendered: Rendered) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in rendered.pods()}
    for found in rendered.objects:
        selector = found["spec"].get("selector", {}) if "spec" in found else {}
        selector = selector.get("matchLabels", selector)
        if found["kind"] not in ("Service", "PodDisruptionBudget", "Deployment", "StatefulSet"):
            continue
        selector = {k: v for k, v in selector.items() if not k.startswith("statefulset.")}
        chosen = {name for name, own in labels.items() if selector.items() <= own.items()}
        component = found["metadata"]["labels"]["app.kubernetes.io/component"]
        assert chosen == {name for name in labels if name.endswith(f"-{component}")}, found


def test_crd_equals_source_file_and_is_kept_on_uninstall() -> None:
    made = render().find("CustomResourceDefinition", "elasticjobs.elasticjob.dev")
    source = CHART.parents[1] / "crds" / "elasticjobs.elasticjob.dev.yaml"
    assert made["spec"] == yaml.safe_load(source.read_text())["spec"]
    assert made["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert not render(MATRIX["little"]).kinds() & {"CustomResourceDefinition"}


def test_dashboard_is_rendered_unchanged() -> None:
    made = render(MATRIX["watched"]).find("ConfigMap", "elasticjob-dashboard")
    source = json.loads((CHART / "files" / "dashboard.json").read_text())
    assert json.loads(made["data"]["elasticjob.json"]) == source


def test_kubernetes_1_28_is_refused() -> None:
    with pytest.raises(HelmRefused, match=r"requires kubeVersion: >=1\.29\.0-0"):
        render(kubernetes="v1.28.9")
    render(kubernetes="v1.31.2-eks-1234567")


def test_long_release_name_gives_valid_object_names() -> None:
    rendered = render(
        {"etcd": {"members": 3}}, name="a-name-of-53-characters-as-long-as-helm-lets-it-be-01"
    )
    for found in rendered.objects:
        limit = 52 if found["kind"] == "CronJob" else 63
        if found["kind"] != "CustomResourceDefinition" and "namespace" in found["metadata"]:
            assert len(found["metadata"]["name"]) <= limit


NUMBERS: Json = {
    "fullnameOverride": "ej",
    "watchNamespaces": ["123", "null"],
    "networkPolicy": {"jobNamespaces": ["0"]},
    "operator": {"priorityClassName": "1", "serviceAccount": {"name": "2"}},
    "etcd": {"persistence": {"storageClassName": "3"}, "priorityClassName": "1"},
    "dashboard": {"enabled": True, "tls": {"secretName": "4"}},
    "metrics": {name: {"enabled": True} for name in ("serviceMonitor", "dashboard")},
    "crds": {"install": False},
}
NUMBERED_ETCD: Json = {
    **EXTERNAL,
    "externalEtcd": {**EXTERNAL["externalEtcd"], "secretName": "5"},
}


NAMED_NULL: Json = {
    "fullnameOverride": "null",
    "nameOverride": "123",
    "metrics": {"prometheusRule": {"enabled": True}},
}


@pytest.mark.parametrize(
    "values",
    [NUMBERS, {**NUMBERS, **NUMBERED_ETCD}, NAMED_NULL],
    ids=["own", "external", "null"],
)
def test_names_that_look_like_other_types_stay_strings(values: Json) -> None:
    """A namespace or class may be named 123, on or null, which YAML reads as other types."""
    rendered = Rendered(
        [
            document
            for text in helm(
                *("template", "1", str(CHART), "--namespace", "456"),
                *("--kube-version", KUBERNETES_VERSION),
                values=values,
            ).split("\n---\n")
            if (document := yaml.safe_load(text))
        ]
    )
    names = [value for one in rendered.objects for value in _names(one)]
    assert names
    assert [value for value in names if not isinstance(value, str)] == []


_NAMES = {
    *("name", "namespace", "priorityClassName", "storageClassName", "secretName"),
    *("serviceAccountName", "kubernetes.io/metadata.name", "app.kubernetes.io/instance"),
    "app.kubernetes.io/name",
}


def _names(value: Any) -> Iterator[Any]:
    """Yield all values of fields that hold a name."""
    if isinstance(value, dict):
        if value.get("kind") == "CustomResourceDefinition":
            return
        for key, one in value.items():
            if key in _NAMES and not isinstance(one, dict | list):
                yield one
            elif key == "resourceNames":
                yield from one
            else:
                yield from _names(one)
    elif isinstance(value, list):
        for one in value:
            yield from _names(one)


def test_rendering_is_deterministic() -> None:
    words = ("template", RELEASE, str(CHART), "--kube-version", KUBERNETES_VERSION)
    first, second = (helm(*words) for _ in range(2))
    assert first == second


def test_change_of_a_rendered_object_stays_with_its_test() -> None:
    """Equal values are rendered and parsed once."""
    first, second = (dict(render().pods())["Deployment/elasticjob-operator"] for _ in range(2))
    assert first == second
    first["spec"].clear()
    assert second["spec"] == dict(render().pods())["Deployment/elasticjob-operator"]["spec"] != {}


def rules(values: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    made = render(values).find("PrometheusRule", "elasticjob")
    return {group["name"]: group["rules"] for group in made["spec"]["groups"]}


def test_alerts_are_those_of_the_file_with_the_address_of_their_section() -> None:
    source = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    page = "https://docs.example/runbook.html"
    rule = {"enabled": True, "runbookUrl": page}
    made = rules({"metrics": {"prometheusRule": rule}})
    for group in source:
        for alert in group["rules"]:
            alert["annotations"]["runbook_url"] = f"{page}#{alert['alert'].lower()}"
    assert made == {group["name"]: group["rules"] for group in source}


def test_alerts_of_etcd_are_for_the_bundled_one() -> None:
    rule = {"metrics": {"prometheusRule": {"enabled": True}}}
    assert "elasticjob-etcd" in rules(rule)
    assert "elasticjob-etcd" not in rules({**EXTERNAL, **rule})
