"""References between the chart's parts: endpoints, certificates, variables, ports."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elasticjob_operator.etcd_tls.certs_command import Exit, Request
from elasticjob_operator.etcd_tls.certs_command import _parsed as parsed
from elasticjob_operator.settings import from_environment
from tests.integration.helm_chart import (
    EXTERNAL,
    MATRIX,
    NAMESPACE,
    Json,
    Rendered,
    environment,
    pod_template,
    render,
)


@pytest.fixture(scope="module", params=MATRIX, ids=lambda name: name.replace(" ", "-"))
def rendered(request: pytest.FixtureRequest) -> Rendered:
    return render(MATRIX[request.param])


def test_operator_settings_accept_rendered_environment(rendered: Rendered, tmp_path: Path) -> None:
    """The settings module itself reads the variables, with the mounted files in their places."""
    deployments = (o for o in rendered.objects if o["kind"] == "Deployment")
    deployment = next(o for o in deployments if o["metadata"]["name"].endswith("-operator"))
    pod = pod_template(deployment)
    variables = environment(pod)
    mounts = {m["name"]: m["mountPath"] for m in pod["spec"]["containers"][0]["volumeMounts"]}
    for volume in pod["spec"]["volumes"]:
        for item in volume.get("secret", {}).get("items", ()):
            place = tmp_path / mounts[volume["name"]].lstrip("/") / item["path"]
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("root")
    told = {
        name: f"{tmp_path}{value}" if name.endswith("_FILE") else value
        for name, value in variables.items()
        if isinstance(value, str)
    }
    told |= {"ELASTICJOB_LEASE_NAMESPACE": NAMESPACE, "ELASTICJOB_POD_NAME": "operator-1"}
    settings = from_environment(told)
    assert settings.sidecar.image == "ghcr.io/elasticjob/sidecar:0.1.0"
    assert settings.lease.name == deployment["metadata"]["name"]
    assert (settings.metrics_port, settings.health_port) == (8080, 8081)
    assert settings.etcd.manage_users == (settings.etcd.user is not None)
    secure = settings.etcd.endpoints[0].startswith("https://")
    assert secure == (settings.etcd.tls is not None)
    # The operator's permission on the Lease is bound to its name.
    roles = [o for o in rendered.objects if o["kind"] == "Role"]
    assert any(
        rule.get("resourceNames") == [settings.lease.name] for r in roles for rule in r["rules"]
    )


def services_of(rendered: Rendered) -> set[str]:
    return {o["metadata"]["name"] for o in rendered.objects if o["kind"] == "Service"}


@pytest.mark.parametrize(
    ("values", "endpoints"),
    [
        ({}, ["https://elasticjob-etcd.elasticjob-system.svc:2379"]),
        (MATRIX["no TLS"], ["http://elasticjob-etcd.elasticjob-system.svc:2379"]),
        (
            MATRIX["three members"],
            [f"https://elasticjob-etcd-{n}.elasticjob-system.svc:2379" for n in range(3)],
        ),
        (EXTERNAL, ["https://etcd.example:2379"]),
    ],
)
def test_endpoints_match_rendered_services(values: Json, endpoints: list[str]) -> None:
    rendered = render(values)
    found = environment(pod_template(rendered.find("Deployment", "elasticjob-operator")))
    assert found["ELASTICJOB_ETCD_ENDPOINTS"].split(",") == endpoints
    own = {e.split("/")[2].split(".")[0] for e in endpoints if ".svc:" in e}
    assert own <= services_of(rendered)


def etcd_options(rendered: Rendered) -> dict[str, str]:
    command = pod_template(rendered.find("StatefulSet", "elasticjob-etcd"))["spec"]["containers"][0]
    pairs = (word.removeprefix("--").partition("=") for word in command["command"][1:])
    return {name: value for name, _, value in pairs}


def test_etcd_arguments_follow_values() -> None:
    found = etcd_options(render({"etcd": {"members": 3, "electionMilliseconds": 2000}}))
    assert found["quota-backend-bytes"] == "2147483648"
    assert found["election-timeout"] == "2000"
    assert found["initial-cluster"].split(",") == [
        f"elasticjob-etcd-{n}=https://elasticjob-etcd-{n}.elasticjob-etcd-members.{NAMESPACE}.svc:2380"
        for n in range(3)
    ]
    assert "peer-client-cert-auth" in found


def test_etcd_without_tls_mounts_no_certificate() -> None:
    rendered = render(MATRIX["no TLS"])
    assert not any(
        "cert" in option or "ca" in option.split("-") for option in etcd_options(rendered)
    )
    # Its users still need a password, which the same hook makes.
    assert rendered.has("Job", "elasticjob-certificates-hook")


def test_certificates_cover_dialled_names() -> None:
    rendered = render(MATRIX["three members"])
    found = environment(pod_template(rendered.find("Deployment", "elasticjob-operator")))
    dialled = {re.split("[/:]+", e)[1] for e in found["ELASTICJOB_ETCD_ENDPOINTS"].split(",")}
    dialled |= {
        re.sub(r"^.*//[^.]+", "*", e).rpartition(":")[0]
        for e in etcd_options(rendered)["initial-cluster"].split(",")
    }
    assert dialled <= set(certificate_request(rendered).names)


def certificate_request(rendered: Rendered) -> Request:
    """Return the certificates that the hook and the CronJob request, as parsed by the command."""
    pods = dict(rendered.pods())
    requests = []
    for workload in ("Job/elasticjob-certificates-hook", "CronJob/elasticjob-certificates"):
        container = pods[workload]["spec"]["containers"][0]
        assert container["command"] == ["python", "-m", "elasticjob_operator", "certs"]
        requests.append(parsed(container["args"]))
    assert requests[0] == requests[1]
    return requests[0]


def test_certificates_are_stored_in_mounted_secret() -> None:
    rendered = render()
    request = certificate_request(rendered)
    assert request.namespace == NAMESPACE
    mounted = {
        volume["secret"]["secretName"]
        for _, pod in rendered.pods()
        for volume in pod["spec"].get("volumes", ())
        if "secret" in volume
    }
    assert mounted == {request.secret}


@pytest.mark.parametrize(
    ("etcd", "restarted"),
    [
        ({}, True),
        ({"tls": {"clientCertificates": "Optional"}}, False),
        ({"tls": {"clientCertificates": "Optional"}, "members": 3}, True),
    ],
    ids=["client certificates", "neither clients nor peers", "peers"],
)
def test_etcd_is_restarted_to_trust_new_authority(etcd: Json, restarted: bool) -> None:
    request = certificate_request(render({"etcd": etcd}))
    assert request.members == ("elasticjob-etcd" if restarted else None)


def test_permanent_failure_is_not_retried() -> None:
    hook = render().find("Job", "elasticjob-certificates-hook")["spec"]
    (rule,) = hook["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert Exit.REFUSED in rule["onExitCodes"]["values"]
    assert Exit.TRY_AGAIN not in rule["onExitCodes"]["values"]
    assert rule["onExitCodes"]["containerName"] == hook["template"]["spec"]["containers"][0]["name"]


def test_hook_runs_before_other_objects_and_is_cleaned_up() -> None:
    rendered = render()
    hooks: dict[str, dict[str, str]] = {}
    for found in rendered.objects:
        annotations = found["metadata"].get("annotations", {})
        if "helm.sh/hook" in annotations:
            assert annotations["helm.sh/hook"] == "pre-install,pre-upgrade"
            assert (
                annotations["helm.sh/hook-delete-policy"] == "before-hook-creation,hook-succeeded"
            )
            hooks[found["kind"]] = annotations
    weights = {kind: int(annotations["helm.sh/hook-weight"]) for kind, annotations in hooks.items()}
    assert weights.keys() == {"ServiceAccount", "Role", "RoleBinding", "Job"}
    assert max(weights.values()) == weights["Job"] > weights["Role"]


@pytest.mark.parametrize("name", ["neither", "a Secret of one's own", "external"])
def test_no_certificates_are_created_without_tls(name: str) -> None:
    assert not render(MATRIX[name]).kinds() & {"Job", "CronJob"}


def test_monitors_select_services_with_their_port() -> None:
    rendered = render(MATRIX["watched"])
    monitors = [o for o in rendered.objects if o["kind"] == "ServiceMonitor"]
    assert len(monitors) == 2
    for monitor in monitors:
        wanted = monitor["spec"]["selector"]["matchLabels"]
        ports = [
            port["name"]
            for o in rendered.objects
            if o["kind"] == "Service" and wanted.items() <= o["metadata"]["labels"].items()
            for port in o["spec"]["ports"]
        ]
        assert ports.count(monitor["spec"]["endpoints"][0]["port"]) == 1
