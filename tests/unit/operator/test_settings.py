"""Operator settings: read once, and wrong values named."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob_operator.domain.manifests.owned_objects import PolicyPeer
from elasticjob_operator.settings import SettingsError, from_environment

LEAST = {
    "ELASTICJOB_SIDECAR_IMAGE": "sidecar:1",
    "ELASTICJOB_ETCD_ENDPOINTS": "https://etcd-0:2379, https://etcd-1:2379",
    "ELASTICJOB_POD_NAME": "operator-0",
}


def test_defaults() -> None:
    found = from_environment(LEAST)
    assert found.sidecar.image == "sidecar:1"
    assert found.sidecar.pull_policy == "IfNotPresent"
    assert found.etcd.endpoints == ("https://etcd-0:2379", "https://etcd-1:2379")
    assert found.etcd.tls is None
    assert not found.etcd.manage_users
    assert found.lease.name == "elasticjob-operator"
    assert found.lease.identity == "operator-0"
    assert found.namespaces == ()
    assert found.policy_peer is None
    assert (found.metrics_port, found.health_port) == (8080, 8081)
    assert (found.log_format, found.log_level) == ("text", "info")


def test_all_settings(tmp_path: Path) -> None:
    files = {}
    for name in ("CA", "CERT", "KEY", "USER", "PASSWORD"):
        path = tmp_path / name
        path.write_text(f"{name.lower()}\n")
        files[f"ELASTICJOB_ETCD_{name}_FILE"] = str(path)
    found = from_environment(
        LEAST
        | files
        | {
            "ELASTICJOB_MANAGE_ETCD_USERS": "true",
            "ELASTICJOB_ETCD_SERVER_NAME": "etcd",
            "ELASTICJOB_CREDENTIALS_DAYS": "0",
            "ELASTICJOB_ALLOWED_ENDPOINTS": "http://10.0.0.1:2379",
            "ELASTICJOB_NETWORK_POLICIES": "true",
            "ELASTICJOB_OPERATOR_LABELS": "app.kubernetes.io/name=elasticjob,tier=1",
            "ELASTICJOB_LEASE_NAMESPACE": "system",
            "ELASTICJOB_NAMESPACES": "a, b",
            "ELASTICJOB_PULL_SECRETS": "one,two",
            "ELASTICJOB_METRICS_PORT": "9090",
            "ELASTICJOB_LOG_FORMAT": "json",
        }
    )
    assert (found.etcd.user, found.etcd.password) == ("user", "password")
    assert found.etcd.manage_users
    assert found.etcd.credentials_days == 0
    assert found.etcd.tls is not None
    assert found.etcd.tls.server_name == "etcd"
    assert found.etcd.allowed == {"http://10.0.0.1:2379"}
    assert found.namespaces == ("a", "b")
    labels = (("app.kubernetes.io/name", "elasticjob"), ("tier", "1"))
    assert found.policy_peer == PolicyPeer("system", labels)
    assert found.sidecar.pull_secrets == ("one", "two")
    assert found.metrics_port == 9090
    assert found.log_format == "json"


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("ELASTICJOB_SIDECAR_IMAGE", "", "must be set"),
        ("ELASTICJOB_SIDECAR_PULL_POLICY", "Sometimes", "must be one of Always"),
        ("ELASTICJOB_SIDECAR_LIMITS_IN", "Some", "must be one of GuaranteedPods, AllPods"),
        ("ELASTICJOB_NETWORK_POLICIES", "true", "needs ELASTICJOB_OPERATOR_LABELS"),
        ("ELASTICJOB_ETCD_ENDPOINTS", "", "at least one etcd"),
        ("ELASTICJOB_ETCD_ENDPOINTS", "http://etcd", "must hold http"),
        ("ELASTICJOB_ETCD_ENDPOINTS", "ftp://etcd:21", "must hold http"),
        ("ELASTICJOB_ALLOWED_ENDPOINTS", "etcd:99999", "must hold http"),
        ("ELASTICJOB_ETCD_CA_FILE", "/nowhere", "must be a file"),
        ("ELASTICJOB_ETCD_USER_FILE", "/nowhere", "cannot be read"),
        ("ELASTICJOB_MANAGE_ETCD_USERS", "true", "needs etcd's root user"),
        ("ELASTICJOB_MANAGE_ETCD_USERS", "yes", "must be one of false, true"),
        ("ELASTICJOB_CREDENTIALS_DAYS", "-1", "must be days from 0 to 3650"),
        ("ELASTICJOB_CREDENTIALS_DAYS", "3651", "must be days from 0 to 3650"),
        ("ELASTICJOB_HEALTH_PORT", "http", "must be a port"),
        ("ELASTICJOB_METRICS_PORT", "70000", "must be a port"),
        ("ELASTICJOB_LOG_FORMAT", "xml", "must be one of text, json"),
        ("ELASTICJOB_LOG_LEVEL", "loud", "must be one of debug"),
    ],
)
def test_invalid_setting_is_named(variable: str, value: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as error:
        from_environment(LEAST | {variable: value})
    assert variable in str(error.value)


@pytest.mark.parametrize(("one", "other"), [("CERT", "KEY"), ("USER", "PASSWORD")])
def test_incomplete_pair_of_settings_is_refused(one: str, other: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("content")
    with pytest.raises(SettingsError, match="must be set together") as error:
        from_environment(LEAST | {f"ELASTICJOB_ETCD_{one}_FILE": str(path)})
    assert f"ELASTICJOB_ETCD_{other}_FILE" in str(error.value)


@pytest.mark.parametrize("labels", ["app", "=operator", "app="])
def test_malformed_label_is_refused(labels: str) -> None:
    variables = {"ELASTICJOB_NETWORK_POLICIES": "true", "ELASTICJOB_OPERATOR_LABELS": labels}
    with pytest.raises(SettingsError, match="must be key=value"):
        from_environment(LEAST | variables)
