"""Agent settings from environment variables: read once; errors name the variable."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticjob_agent.setting_values import SettingsError
from elasticjob_agent.settings import from_environment


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


def test_minimal_environment(environ: dict[str, str]) -> None:
    settings = from_environment(environ)
    assert settings.run_id == "uid-7"
    assert settings.launch == "PerWorker"
    assert settings.etcd.endpoints == ("etcd-0:2379", "http://etcd-1:2379")
    assert settings.etcd.tls is None
    assert settings.job_key == b"secret"
    assert settings.bounds is None, "an operator writes them"
    assert settings.logs.folder is None


def test_complete_environment(environ: dict[str, str], tmp_path: Path) -> None:
    for name in ("ca", "cert", "key", "user", "password"):
        (tmp_path / name).write_text(f"{name}\n")
    environ |= {
        "ELASTICJOB_RUN_ID": "digits",
        "ELASTICJOB_SLOTS": "8",
        "ELASTICJOB_LAUNCH": "PerNode",
        "ELASTICJOB_NNODES": "1:4",
        "ELASTICJOB_LOG_DIR": "/logs",
        "ELASTICJOB_ETCD_CA_FILE": str(tmp_path / "ca"),
        "ELASTICJOB_ETCD_CERT_FILE": str(tmp_path / "cert"),
        "ELASTICJOB_ETCD_KEY_FILE": str(tmp_path / "key"),
        "ELASTICJOB_ETCD_USER_FILE": str(tmp_path / "user"),
        "ELASTICJOB_ETCD_PASSWORD_FILE": str(tmp_path / "password"),
        "ELASTICJOB_STOP_GRACE_SECONDS": "2.5",
        "ELASTICJOB_KEEP_ALIVE_SECONDS": "7",
        "ELASTICJOB_TERMINATION_LOG": "",
    }
    settings = from_environment(environ)
    assert (settings.slots, settings.nproc) == (None, "8")
    assert (settings.launch, settings.nnodes) == ("PerNode", "1:4")
    assert settings.logs.folder == Path("/logs/digits")
    assert settings.etcd.tls is not None
    assert (settings.etcd.user, settings.etcd.password) == ("user", "password")
    assert settings.etcd.login_files is not None
    assert settings.etcd.login_files.read() == ("user", "password")
    assert settings.stop_grace_seconds == 2.5
    assert settings.keep_alive_seconds == 7.0
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
        ("ELASTICJOB_LAUNCH", "Auto"),
        ("ELASTICJOB_NNODES", "2"),
        ("ELASTICJOB_JOB_KEY_FILE", ""),
        ("ELASTICJOB_JOB_KEY_FILE", "/no/such/file"),
        ("ELASTICJOB_ETCD_CA_FILE", "/no/such/file"),
        ("ELASTICJOB_ETCD_USER_FILE", "/no/such/file"),
        ("ELASTICJOB_KEEP_ALIVE_SECONDS", "0.001"),
        ("ELASTICJOB_STOP_GRACE_SECONDS", "-1"),
        ("ELASTICJOB_STOP_GRACE_SECONDS", "soon"),
        ("ELASTICJOB_STOP_GRACE_SECONDS", "nan"),
        ("ELASTICJOB_KEEP_ROUNDS", "0"),
        ("ELASTICJOB_HEALTH_PORT", "http"),
    ],
)
def test_invalid_value_names_its_variable(environ: dict[str, str], name: str, value: str) -> None:
    environ[name] = value
    with pytest.raises(SettingsError, match=name):
        from_environment(environ)


def test_number_of_workers_may_be_left_to_the_launcher(environ: dict[str, str]) -> None:
    assert from_environment(environ | {"ELASTICJOB_SLOTS": "launcher"}).slots is None
    assert from_environment(environ | {"ELASTICJOB_SLOTS": "8"}).slots == 8


@pytest.mark.parametrize("workers", [1, 2, 8, 16, 256, 1024])
def test_logs_of_all_workers_fit_their_limit(environ: dict[str, str], workers: int) -> None:
    total = 448 * 1024 * 1024
    limits = {"ELASTICJOB_TOTAL_LOG_BYTES": str(total), "ELASTICJOB_KEEP_ROUNDS": "10"}
    logs = from_environment(environ | limits).logs
    assert 4096 <= logs.stream_bytes(workers) <= logs.max_bytes
    assert 2 * workers * 10 * logs.stream_bytes(workers) <= total
    assert from_environment(environ).logs.stream_bytes(workers) == 16 * 1024 * 1024


def test_certificate_requires_its_key(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "cert").write_text("x")
    environ["ELASTICJOB_ETCD_CERT_FILE"] = str(tmp_path / "cert")
    with pytest.raises(SettingsError, match="ELASTICJOB_ETCD_KEY_FILE"):
        from_environment(environ)


BOUNDS = '{"minNodes":1,"maxNodes":4,"settleSeconds":1.5}'


def test_other_backend_is_read_from_environment(environ: dict[str, str]) -> None:
    assert from_environment(environ).backend == "etcd"
    environ |= {
        "ELASTICJOB_BACKEND": "c10d",
        "ELASTICJOB_ENDPOINTS": "digits-0.digits.team.svc:29400",
        "ELASTICJOB_STORE_HOST": "true",
        "ELASTICJOB_BOUNDS": BOUNDS,
    }
    settings = from_environment(environ)
    assert (settings.backend, settings.hosts_store) == ("c10d", True)
    assert settings.rendezvous_id == "uid-7-2", "another one after each suspension"
    assert settings.bounds is not None
    assert (settings.bounds.min_nodes, settings.bounds.max_nodes) == (1, 4)
    assert not from_environment(environ | {"ELASTICJOB_STORE_HOST": "false"}).hosts_store


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"ELASTICJOB_BACKEND": "zookeeper"}, "ELASTICJOB_BACKEND must be one of etcd, etcd-v2"),
        ({"ELASTICJOB_BACKEND": "etcd-v2"}, "ELASTICJOB_BOUNDS must be set"),
        ({"ELASTICJOB_BACKEND": "c10d", "ELASTICJOB_BOUNDS": "{}"}, "ELASTICJOB_BOUNDS must be a"),
    ],
)
def test_missing_setting_of_other_backend_is_named(
    environ: dict[str, str], variables: dict[str, str], named: str
) -> None:
    with pytest.raises(SettingsError, match=named):
        from_environment(environ | variables)
