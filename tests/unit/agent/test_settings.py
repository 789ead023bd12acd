"""What an agent is told by variables: read once, and refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob_agent.settings import SettingsError, from_environment


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    key = tmp_path / "key"
    key.write_bytes(b"secret\n")
    return {
        "ELASTICJOB_PREFIX": "/elasticjob/team/uid-7/2/",
        "ELASTICJOB_ENDPOINTS": "etcd-0:2379, http://etcd-1:2379",
        "ELASTICJOB_MEMBER_ID": "pod-uid",
        "ELASTICJOB_NAME": "digits-0",
        "ELASTICJOB_ADDRESS": "10.0.0.7",
        "ELASTICJOB_JOB_KEY_FILE": str(key),
    }


def test_the_least_that_is_needed(environ: dict[str, str]) -> None:
    settings = from_environment(environ)
    assert settings.run_id == "uid-7"
    assert settings.etcd.endpoints == ("etcd-0:2379", "http://etcd-1:2379")
    assert settings.etcd.tls is None
    assert settings.job_key == b"secret"
    assert settings.bounds is None, "an operator writes them"
    assert settings.logs.folder is None


def test_everything_else(environ: dict[str, str], tmp_path: Path) -> None:
    for name in ("ca", "cert", "key", "user", "password"):
        (tmp_path / name).write_text(f"{name}\n")
    environ |= {
        "ELASTICJOB_RUN_ID": "digits",
        "ELASTICJOB_SLOTS": "8",
        "ELASTICJOB_LOG_DIR": "/logs",
        "ELASTICJOB_ETCD_CA_FILE": str(tmp_path / "ca"),
        "ELASTICJOB_ETCD_CERT_FILE": str(tmp_path / "cert"),
        "ELASTICJOB_ETCD_KEY_FILE": str(tmp_path / "key"),
        "ELASTICJOB_ETCD_USER_FILE": str(tmp_path / "user"),
        "ELASTICJOB_ETCD_PASSWORD_FILE": str(tmp_path / "password"),
        "ELASTICJOB_STOP_GRACE_SECONDS": "2.5",
        "ELASTICJOB_TERMINATION_LOG": "",
    }
    settings = from_environment(environ)
    assert settings.slots == 8
    assert settings.logs.folder == Path("/logs/digits")
    assert settings.etcd.tls is not None
    assert (settings.etcd.user, settings.etcd.password) == ("user", "password")
    assert settings.stop_grace_seconds == 2.5
    assert settings.termination_log is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ELASTICJOB_PREFIX", ""),
        ("ELASTICJOB_PREFIX", "/elasticjob/team/uid-7/"),
        ("ELASTICJOB_ENDPOINTS", ""),
        ("ELASTICJOB_ENDPOINTS", " , "),
        ("ELASTICJOB_ENDPOINTS", "etcd"),
        ("ELASTICJOB_ENDPOINTS", "etcd:port"),
        ("ELASTICJOB_ENDPOINTS", "etcd:99999"),
        ("ELASTICJOB_MEMBER_ID", ""),
        ("ELASTICJOB_MEMBER_ID", "a/b"),
        ("ELASTICJOB_NAME", ""),
        ("ELASTICJOB_ADDRESS", "digits-0.digits"),
        ("ELASTICJOB_SLOTS", "0"),
        ("ELASTICJOB_SLOTS", "auto"),
        ("ELASTICJOB_JOB_KEY_FILE", ""),
        ("ELASTICJOB_JOB_KEY_FILE", "/no/such/file"),
        ("ELASTICJOB_ETCD_CA_FILE", "/no/such/file"),
        ("ELASTICJOB_ETCD_USER_FILE", "/no/such/file"),
        ("ELASTICJOB_STOP_GRACE_SECONDS", "-1"),
        ("ELASTICJOB_STOP_GRACE_SECONDS", "soon"),
        ("ELASTICJOB_STOP_GRACE_SECONDS", "nan"),
        ("ELASTICJOB_KEEP_ROUNDS", "0"),
        ("ELASTICJOB_HEALTH_PORT", "http"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(
    environ: dict[str, str], name: str, value: str
) -> None:
    environ[name] = value
    with pytest.raises(SettingsError, match=name):
        from_environment(environ)


def test_a_certificate_needs_its_key(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("x")
    environ["ELASTICJOB_ETCD_CERT_FILE"] = str(tmp_path / "cert")
    with pytest.raises(SettingsError, match="ELASTICJOB_ETCD_KEY_FILE"):
        from_environment(environ)
