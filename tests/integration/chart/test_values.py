"""Chart's values: wrong ones are refused by their path, and each one has an effect."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.integration.helm_chart import CHART, RELEASE, HelmRefused, Json, render, template

VALUES: Json = yaml.safe_load((CHART / "values.yaml").read_text())


def nested(path: str, value: Any) -> Json:
    """Return values with only this one set."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def merged(*layers: Json) -> Json:
    """Merge the layers; later ones take precedence."""
    made: Json = {}
    for layer in layers:
        for key, value in layer.items():
            both = isinstance(value, dict) and isinstance(made.get(key), dict)
            made[key] = merged(made[key], value) if both else value
    return made


@pytest.mark.parametrize(
    ("path", "value", "named", "reason"),
    [
        ("replicas", 2, "", "'replicas' not allowed"),
        ("operator.replica", 2, "/operator", "'replica' not allowed"),
        ("operator.replicas", "two", "/operator/replicas", "want integer"),
        ("operator.replicas", -1, "/operator/replicas", "minimum"),
        ("operator.logLevel", "verbose", "/operator/logLevel", "one of 'debug'"),
        ("operator.logFormat", "xml", "/operator/logFormat", "one of 'json'"),
        ("operator.credentialsDays", -1, "/operator/credentialsDays", "minimum"),
        ("operator.image.tag", "latest", "/operator/image/tag", "not"),
        ("operator.image.digest", "sha256:abc", "/operator/image/digest", "pattern"),
        ("operator.image.repository", "Not An Image", "/operator/image/repository", "pattern"),
        ("operator.resources.limit", {}, "/operator/resources", "'limit' not allowed"),
        ("operator.resources.limits.memory", "1 GB", "/operator/resources/limits/memory", ""),
        ("operator.tolerations", [{"keys": "a"}], "/operator/tolerations/0", "'keys' not allowed"),
        (
            "operator.podSecurityContext.runAsUser",
            0,
            "/operator/podSecurityContext/runAsUser",
            "minimum",
        ),
        (
            "operator.podSecurityContext.runAsNonRoot",
            False,
            "/operator/podSecurityContext",
            "'runAsNonRoot' not allowed",
        ),
        (
            "operator.podSecurityContext.seccompProfile",
            {"type": "Unconfined"},
            "/operator/podSecurityContext",
            "'seccompProfile' not allowed",
        ),
        ("sidecar.image.pullPolicy", "Sometimes", "/sidecar/image/pullPolicy", "one of 'Always'"),
        ("sidecar.resources.cpu", "500m", "/sidecar/resources", "'cpu' not allowed"),
        ("sidecar.resources.requests.cpu", "half", "/sidecar/resources/requests/cpu", "pattern"),
        ("sidecar.resources.limits.gpu", "1", "/sidecar/resources/limits", "'gpu' not allowed"),
        ("sidecar.resources.limitsIn", "No", "/sidecar/resources/limitsIn", "one of 'Guaranteed"),
        ("sidecar.pullSecrets", "registry", "/sidecar/pullSecrets", "want array"),
        ("imagePullSecrets", ["registry"], "/imagePullSecrets/0", "want object"),
        ("watchNamespaces", "team-a", "/watchNamespaces", "want array"),
        ("watchNamespaces", ["Team A"], "/watchNamespaces/0", "pattern"),
        ("watchNamespaces", ["a", "a"], "/watchNamespaces", "equal"),
        ("watchNamespaceSelector", ["team=a"], "/watchNamespaceSelector", "want object"),
        ("watchNamespaceSelector", {"team": True}, "/watchNamespaceSelector/team", "want string"),
        ("watchNamespaceSelector", {"team": "a,b"}, "/watchNamespaceSelector/team", "pattern"),
        ("watchNamespaceSelector", {"a team": "a"}, "/watchNamespaceSelector", "not allowed"),
        ("allowedEndpoints", ["etcd:2379"], "/allowedEndpoints/0", "pattern"),
        ("etcd.members", 2, "/etcd/members", "one of 1, 3"),
        ("etcd.enabled", "false", "/etcd/enabled", "want boolean"),
        ("etcd.persistence.size", "big", "/etcd/persistence/size", "pattern"),
        ("etcd.persistence.whenDeleted", "Keep", "/etcd/persistence/whenDeleted", "one of"),
        ("etcd.persistence.storageClass", "fast", "/etcd/persistence", "'storageClass' not"),
        ("etcd.quotaBackendBytes", 99999999999, "/etcd/quotaBackendBytes", "maximum"),
        ("etcd.electionMilliseconds", 10000, "/etcd/electionMilliseconds", "maximum"),
        ("etcd.autoCompactionRetention", "soon", "/etcd/autoCompactionRetention", "pattern"),
        ("etcd.certificates.schedule", "daily", "/etcd/certificates/schedule", "pattern"),
        ("etcd.antiAffinity", "hard", "/etcd/antiAffinity", "one of"),
        ("externalEtcd.endpoints", ["ftp://etcd:2379"], "/externalEtcd/endpoints/0", "pattern"),
        ("externalEtcd.secretKeys", ["ca.pem"], "/externalEtcd/secretKeys/0", "one of 'ca.crt'"),
        ("networkPolicy.etcdFrom", [{"pods": {}}], "/networkPolicy/etcdFrom/0", "'pods' not"),
        (
            "networkPolicy.metricsFrom",
            [{"ipBlock": {}}],
            "/networkPolicy/metricsFrom/0/ipBlock",
            "cidr",
        ),
        ("metrics.serviceMonitor.interval", 15, "/metrics/serviceMonitor/interval", "want string"),
        ("crds", True, "/crds", "want object"),
        ("commonLabels", {"a": 1}, "/commonLabels/a", "want string"),
        ("commonLabels", {"a": "b c"}, "/commonLabels/a", "pattern"),
        ("commonLabels", {"a b": "c"}, "/commonLabels", "'a b' not allowed"),
        ("fullnameOverride", "a.b", "/fullnameOverride", "pattern"),
        ("nameOverride", "a_", "/nameOverride", "pattern"),
        ("allowedEndpoints", ["http://etcd:65536"], "/allowedEndpoints/0", "pattern"),
        ("externalEtcd.endpoints", ["https://[::1]:0"], "/externalEtcd/endpoints/0", "pattern"),
    ],
)
def test_invalid_value_is_refused_with_its_path(
    path: str, value: Any, named: str, reason: str
) -> None:
    with pytest.raises(HelmRefused) as refused:
        template(nested(path, value))
    complaint = re.search(rf"- at '{re.escape(named)}': (.*)", str(refused.value))
    assert complaint, refused.value
    assert reason in complaint[1]


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (
            {"etcd": {"members": 3, "persistence": {"enabled": False}}},
            "etcd.persistence.enabled must be true with etcd.members 3",
        ),
        *(
            (
                {"etcd": {"image": {"tag": tag}}},
                f"etcd.image.tag must be 3.6.14, 3.7.1 or later of one of these lines, got {tag}",
            )
            for tag in ("v3.5.35", "3.4.37", "3.5", "v2.3.8", "3.5.21-0")
        ),
        *(
            (
                nested(path, {f"app.kubernetes.io/{label}": "x"}),
                f"{path} must not set app.kubernetes.io/{label} to x: the chart sets it",
            )
            for path in ("commonLabels", "operator.podLabels", "etcd.podLabels")
            for label in ("name", "instance", "component")
        ),
        (
            {"etcd": {"podLabels": {"app.kubernetes.io/name": ""}}},
            "etcd.podLabels must not set app.kubernetes.io/name to : the chart sets it",
        ),
        (
            {"etcd": {"heartbeatMilliseconds": 201}},
            "etcd.electionMilliseconds must be at least 5 times etcd.heartbeatMilliseconds",
        ),
        ({"etcd": {"enabled": False}}, "externalEtcd.endpoints must be given"),
        (
            {
                "etcd": {"enabled": False},
                "externalEtcd": {
                    "endpoints": ["http://etcd:2379"],
                    "secretName": "etcd",
                    "secretKeys": ["user"],
                },
            },
            "externalEtcd.secretKeys must have both user and password",
        ),
        (
            {
                "etcd": {"enabled": False},
                "externalEtcd": {
                    "endpoints": ["http://etcd:2379"],
                    "secretName": "etcd",
                    "secretKeys": ["tls.crt"],
                },
            },
            "externalEtcd.secretKeys must have both tls.crt and tls.key",
        ),
        (
            {"watchNamespaces": ["a"], "watchNamespaceSelector": {"team": "a"}},
            "watchNamespaces and watchNamespaceSelector must not both be given",
        ),
        (
            {"operator": {"serviceAccount": {"create": False}}},
            "operator.serviceAccount.name must be given",
        ),
    ],
)
def test_contradicting_values_are_refused(values: Json, complaint: str) -> None:
    with pytest.raises(HelmRefused, match=re.escape(complaint)):
        template(values)


OBJECTS = [
    *("operator", "sidecar", "etcd", "externalEtcd", "crds", "rbac", "admissionPolicy"),
    *("networkPolicy", "dashboard", "metrics", "operator.image", "operator.serviceAccount"),
    *("sidecar.image", "sidecar.resources", "etcd.image", "etcd.tls", "etcd.auth"),
    *("etcd.certificates", "etcd.persistence", "dashboard.tls", "metrics.serviceMonitor"),
    *("metrics.prometheusRule", "metrics.dashboard"),
]
NEEDED = [
    *("operator.logFormat", "operator.logLevel", "operator.podSecurityContext"),
    *("operator.image.repository", "sidecar.image.repository", "etcd.image.repository"),
    *("sidecar.resources.requests", "sidecar.resources.limits", "etcd.image.tag", "etcd.members"),
    *("etcd.tls.enabled", "etcd.auth.enabled", "etcd.certificates.schedule"),
    *("etcd.persistence.enabled", "etcd.persistence.size", "etcd.podSecurityContext"),
    *("etcd.quotaBackendBytes", "etcd.autoCompactionRetention", "etcd.snapshotCount"),
    *("etcd.heartbeatMilliseconds", "etcd.electionMilliseconds"),
    *("admissionPolicy.maxNodes", "admissionPolicy.maxNprocPerNode"),
]
"""Other values without which templates fail, or render objects that are invalid or unsafe."""


@pytest.mark.parametrize("path", [*OBJECTS, *NEEDED])
def test_needed_value_set_to_null_is_refused_by_its_name(path: str) -> None:
    parent, _, key = path.rpartition(".")
    with pytest.raises(HelmRefused) as refused:
        template(nested(path, None))
    named = re.escape("/" + parent.replace(".", "/") if parent else "")
    assert re.search(rf"- at '{named}': missing property '{key}'", str(refused.value))


@pytest.mark.parametrize(
    ("component", "values"),
    [
        ("etcd", [path for path in NEEDED if path.startswith("etcd.")]),
        ("admissionPolicy", [path for path in NEEDED if path.startswith("admissionPolicy.")]),
    ],
)
def test_values_of_a_component_that_is_off_may_be_null(component: str, values: list[str]) -> None:
    off: Json = {component: {"enabled": False}}
    if component == "etcd":
        off["externalEtcd"] = {"endpoints": ["https://etcd.example:2379"]}
    for path in values:
        _, *between, key = path.split(".")
        place = off[component]
        for name in between:
            place = place.setdefault(name, {})
        place[key] = None
    assert template(off)


@pytest.mark.parametrize("name", ["my.release", "1st"])
def test_release_name_that_no_service_may_have_needs_another_prefix(name: str) -> None:
    with pytest.raises(HelmRefused, match="fullnameOverride must be another prefix"):
        template(name=name)
    assert template({"fullnameOverride": "ej"}, name=name)


@pytest.mark.parametrize("prefix", ["1st", "1"])
def test_prefix_of_a_new_release_begins_with_a_letter(prefix: str) -> None:
    with pytest.raises(HelmRefused, match=f"another prefix than {prefix}: names of Services"):
        template({"fullnameOverride": prefix})
    assert f"{prefix}-operator" in template({"fullnameOverride": prefix}, "--is-upgrade")


@pytest.mark.parametrize("name", ["3d", "123", "null", "1e3"])
def test_name_override_begins_with_a_digit_after_the_release_name(name: str) -> None:
    rendered = render({"nameOverride": name}, name="ml")
    assert rendered.has("Service", f"ml-{name}-operator")
    for found in rendered.objects:
        assert found["metadata"]["labels"]["app.kubernetes.io/name"] == name


@pytest.mark.parametrize("name", ["my.app", "My_app", f"{'a' * 39}.more"])
def test_name_override_beside_a_full_name_is_any_label_value(name: str) -> None:
    service = render({"nameOverride": name, "fullnameOverride": "ej"}).find(
        "Service", "ej-operator"
    )
    assert service["spec"]["selector"]["app.kubernetes.io/name"] == name[:40].rstrip(".")
    if len(name) > 40:
        return
    with pytest.raises(HelmRefused, match=f"another prefix than elasticjob-{name}"):
        template({"nameOverride": name})


OWN = {"app.kubernetes.io/name": "elasticjob", "app.kubernetes.io/instance": RELEASE}


@pytest.mark.parametrize(
    "values",
    [
        {"commonLabels": OWN},
        {"commonLabels": {"app.kubernetes.io/part-of": "elasticjob"}},
        {"operator": {"podLabels": {**OWN, "app.kubernetes.io/component": "operator"}}},
        {"etcd": {"podLabels": {**OWN, "app.kubernetes.io/component": "etcd"}}},
    ],
)
def test_labels_that_the_chart_has_itself_change_nothing(values: Json) -> None:
    assert template(values) == template()


def test_each_label_is_rendered_once() -> None:
    labels = {"team": "a", "app.kubernetes.io/part-of": "platform"}
    kinds = ("serviceMonitor", "prometheusRule", "dashboard")
    text = template(
        {
            "commonLabels": {"team": "", "app.kubernetes.io/part-of": "other"},
            "operator": {"podLabels": labels},
            "etcd": {"podLabels": labels},
            "metrics": {kind: {"enabled": True, "labels": labels} for kind in kinds},
        }
    )
    for document in text.split("\n---\n"):
        for block in re.findall(r"^( *)labels:\n((?:\1  .*\n)+)", document, re.M):
            keys = [line.partition(": ")[0] for line in block[1].splitlines()]
            assert sorted(keys) == sorted(set(keys)), document
    assert text.count("team: a\n") == 6


@pytest.mark.parametrize("tag", ["v3.6.14", "3.7.1", "v3.10.0", "4.0.0", "mirrored", "2026.01.3"])
def test_etcd_tag_without_an_old_version_is_accepted(tag: str) -> None:
    assert template({"etcd": {"image": {"tag": tag}}})


def test_version_of_a_digest_or_of_an_external_etcd_is_not_checked() -> None:
    old = {"tag": "v3.5.35"}
    assert template({"etcd": {"image": {**old, "digest": "sha256:" + "a" * 64}}})
    external = {"endpoints": ["http://etcd:2379"]}
    assert template({"etcd": {"enabled": False, "image": old}, "externalEtcd": external})


def test_parent_chart_may_set_globals() -> None:
    assert template({"global": {"registry": "mirror.example"}}) == template()


def leaves(values: Json, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value that a user sets; maps and Kubernetes types count as one value."""
    for key, value in values.items():
        here = f"{path}.{key}".lstrip(".")
        whole = key in ("podSecurityContext", "labels") or here.endswith(
            ("operator.resources", "etcd.resources", "dashboard.resources")
        )
        if isinstance(value, dict) and value and not whole:
            yield from leaves(value, here)
        else:
            yield here, value


MONITORED: Json = {"metrics": {"serviceMonitor": {"enabled": True}}}
ALERTING: Json = {"metrics": {"prometheusRule": {"enabled": True}}}
PAGE: Json = {"dashboard": {"enabled": True, "tls": {"secretName": "tls"}}}
SHOWN: Json = {"metrics": {"dashboard": {"enabled": True}}}
# Other values that must be set for a value to matter.
CONTEXT: dict[str, Json] = {
    "externalEtcd": {
        "etcd": {"enabled": False},
        "externalEtcd": {"endpoints": ["http://etcd:2379"], "secretName": "etcd"},
    },
    "externalEtcd.manageUsers": {"externalEtcd": {"secretKeys": ["user", "password"]}},
    "etcd.enabled": {"externalEtcd": {"endpoints": ["http://etcd:2379"]}},
    "etcd.antiAffinity": {"etcd": {"members": 3}},
    "metrics.serviceMonitor.interval": MONITORED,
    "metrics.serviceMonitor.labels": MONITORED,
    "metrics.prometheusRule.labels": ALERTING,
    "metrics.prometheusRule.runbookUrl": ALERTING,
    "metrics.dashboard.labels": SHOWN,
    "metrics.dashboard.annotations": SHOWN,
    "dashboard.hosts": PAGE,
    "dashboard.from": PAGE,
    "dashboard.tls.secretName": {"dashboard": {"enabled": True}},
    "dashboard.resources": {"dashboard": {"enabled": True}},
    "operator.serviceAccount.create": {"operator": {"serviceAccount": {"name": "given"}}},
}
# Values other than the default that the default's type does not suggest.
OTHER: dict[str, Any] = {
    "admissionPolicy.maxNodes": 100,
    "admissionPolicy.maxNprocPerNode": 8,
    "etcd.members": 3,
    "etcd.tls.clientCertificates": "Optional",
    "externalEtcd.knownUsers": ["admin"],
    "etcd.antiAffinity": "required",
    "etcd.autoCompactionRetention": "1h",
    "etcd.certificates.schedule": "0 0 * * 0",
    "etcd.persistence.size": "9Gi",
    "etcd.persistence.whenDeleted": "Delete",
    "operator.logFormat": "text",
    "operator.logLevel": "debug",
    "operator.affinity": {"nodeAffinity": {}},
    "sidecar.resources.requests.cpu": "250m",
    "sidecar.resources.requests.memory": "96Mi",
    "sidecar.resources.limits.cpu": "250m",
    "sidecar.resources.limits.memory": "96Mi",
    "sidecar.resources.limitsIn": "AllPods",
    "metrics.serviceMonitor.interval": "99s",
    "metrics.prometheusRule.runbookUrl": "https://docs.example/runbook.html",
    "allowedEndpoints": ["http://other:2379"],
    "externalEtcd.endpoints": ["http://other:2379"],
    "externalEtcd.secretKeys": ["ca.crt"],
    "imagePullSecrets": [{"name": "other"}],
    "dashboard.hosts": ["jobs.example.org"],
    "dashboard.from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    "networkPolicy.metricsFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    "networkPolicy.etcdFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}],
    "networkPolicy.jobNamespaces": ["other"],
    "watchNamespaces": ["other"],
    "sidecar.pullSecrets": ["other"],
}


def another(path: str, value: Any) -> Any:
    """Return a legal value other than the default."""
    match path.rpartition(".")[2], value:
        case _ if path in OTHER:
            return OTHER[path]
        case _, bool():
            return not value
        case _, int():
            return value + 1
        case "digest", _:
            return "sha256:" + "0" * 64
        case "pullPolicy", _:
            return "Always"
        case "tag", _:
            return "v9.9.9"
        case "resources", _:
            return {"limits": {"memory": "3Gi"}}
        case "podSecurityContext", _:
            return {"runAsUser": 4242}
        case "tolerations", _:
            return [{"operator": "Exists"}]
        case "topologySpreadConstraints", _:
            return [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]
        case _, dict():
            return {"other": "thing"}
        case _, str():
            return "other"
    raise AssertionError(f"say in OTHER what else {path} may be")


def context(path: str) -> Json:
    return merged(*(layer for key, layer in CONTEXT.items() if f"{path}.".startswith(f"{key}.")))


@pytest.mark.parametrize("path", [path for path, _ in leaves(VALUES)])
def test_every_value_changes_rendering(path: str) -> None:
    around, default = context(path), dict(leaves(VALUES))[path]
    if not path.startswith("crds."):
        around = merged(around, {"crds": {"install": False}})  # most of the text
    changed = template(merged(around, nested(path, another(path, default))))
    assert changed != template(around)


def test_null_removes_user_id() -> None:
    values = {"operator": {"podSecurityContext": {"runAsUser": None, "fsGroup": None}}}
    deployment = template(values, "--show-only", "templates/operator/deployment.yaml")
    spec = yaml.safe_load(deployment)["spec"]["template"]["spec"]
    assert spec["securityContext"] == {
        "runAsGroup": 65532,
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_digest_takes_precedence_over_tag() -> None:
    digest = "sha256:" + "1" * 64
    text = template({"etcd": {"image": {"digest": digest}}})
    assert f"image: gcr.io/etcd-development/etcd@{digest}\n" in text
