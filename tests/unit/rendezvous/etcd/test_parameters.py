"""Handler settings: the same run as an agent with the same options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticjob_agent.standalone import Options, standalone_agent
from elasticjob_rendezvous.api import RendezvousParameters
from elasticjob_rendezvous.etcd.member import MemberSettings
from elasticjob_rendezvous.etcd.parameters import member_settings, timeout_seconds


def parameters(endpoint: str = "127.0.0.1:2379", **config: Any) -> RendezvousParameters:
    local = config.pop("local_addr", None)
    return RendezvousParameters("elasticjob", endpoint, "run-7", 2, 4, local, **config)


def settings(**config: Any) -> MemberSettings:
    return member_settings(parameters(**config))


@pytest.mark.parametrize(
    "conf",
    [
        {},
        {"incarnation": "3", "increment": "2", "user": "u", "password": "p"},
        {"timeout": "60", "last_call_timeout": "1", "confirm": "2", "settle": "0.5"},
        {"stop_grace": "4", "keep_alive": "3", "protocol": "https"},
        {"scale_up_wait": "60", "leave_grace": "5"},
    ],
)
def test_handler_and_agent_with_equal_options_share_a_rendezvous(conf: dict[str, str]) -> None:
    agent = standalone_agent(
        Options(
            nnodes="2:4",
            nproc_per_node="1",
            rdzv_backend="elasticjob",
            rdzv_endpoint="127.0.0.1:2379",
            rdzv_id="run-7",
            rdzv_conf=",".join(f"{key}={value}" for key, value in conf.items()),
            max_restarts=3,
            local_addr="",
            role="default",
            log_dir="",
            name="",
            no_python=True,
            module=False,
            command=("true",),
        )
    ).settings
    handler = settings(**conf)
    assert handler.config.prefix == agent.prefix
    assert handler.config.bounds == agent.bounds
    assert handler.job_key == agent.job_key
    assert handler.key_in_etcd == agent.key_in_etcd == ("password" not in conf)
    assert handler.config.identity.address == agent.address == "127.0.0.1"
    assert handler.bind_address == agent.bind_address == "127.0.0.1"
    assert handler.tls == agent.etcd.tls


def test_join_timeout_precedes_default_timeout_of_torchrun() -> None:
    assert timeout_seconds(parameters(timeout=900, join_timeout="30")) == 30
    assert timeout_seconds(parameters(timeout=900)) == 900
    assert timeout_seconds(parameters()) == 600


def test_password_among_the_settings_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "password"
    file.write_text("secret")
    settings(user="u", password_file=str(file))
    assert not caplog.records
    settings(user="u", password="secret")
    (record,) = caplog.records
    assert "password_file" in record.getMessage()
    assert "secret" not in record.getMessage()


def test_password_is_read_from_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("secret\n")
    given = settings(user="u", password_file=str(file))
    assert given.password == "secret"
    assert given.job_key == settings(user="u", password="secret").job_key


@pytest.mark.parametrize(
    ("unknown", "said"),
    [
        ("keep_alive_second", "'keep_alive_second'; did you mean keep_alive_seconds?"),
        ("ca_cert", "'ca_cert'; did you mean cacert?"),
        ("is_host", "'is_host'; known are cacert, cert, confirm, "),
    ],
)
def test_unknown_setting_is_refused_with_the_nearest_name(unknown: str, said: str) -> None:
    with pytest.raises(ValueError, match="no rendezvous setting") as refused:
        settings(**{"slots": "2", unknown: "1"})
    assert said in str(refused.value)


def test_settings_added_by_torchrun_are_known() -> None:
    """torchrun adds it in every launch: `timeout`, 900 by default."""
    assert timeout_seconds(parameters(timeout=900)) == 900
    settings(timeout=900)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"settle": "-1"}, "'settle' must be seconds, at least 0, not -1"),
        ({"keep_alive": "0.001"}, r"'keep_alive' must be .* at least 2 \(etcd grants no shorter"),
        ({"confirm": "0.5"}, "'confirm' must be seconds, at least 1"),
        ({"join_timeout": "0"}, "'join_timeout' must be seconds, at least 1"),
        ({"increment": "two"}, "increment"),
        ({"password_file": "/nowhere"}, "password_file"),
        ({"local_addr": "no such host."}, "local address"),
        ({"endpoint": ""}, "endpoint must name etcd"),
    ],
)
def test_invalid_setting_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings(**config)


def test_namespace_with_a_slash_is_refused() -> None:
    with pytest.raises(ValueError, match="'namespace' must not contain a slash: 'team/a'"):
        settings(namespace="team/a")
