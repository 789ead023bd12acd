"""A handler's settings: the same run as an agent that was given the same options."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from elasticjob_agent.options import Options, plain_agent
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
    ],
)
def test_handler_and_agent_with_the_same_options_meet(conf: dict[str, str]) -> None:
    agent = plain_agent(
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
    assert handler.config.identity.address == agent.address == "127.0.0.1"
    assert handler.bind_address == agent.bind_address == "127.0.0.1"
    assert handler.tls == agent.etcd.tls


def test_a_join_timeout_wins_over_the_timeout_that_torchrun_always_gives() -> None:
    assert timeout_seconds(parameters(timeout=900, join_timeout="30")) == 30
    assert timeout_seconds(parameters(timeout=900)) == 900
    assert timeout_seconds(parameters()) == 600


def test_a_password_may_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("secret\n")
    given = settings(user="u", password_file=str(file))
    assert given.password == "secret"
    assert given.job_key == settings(user="u", password="secret").job_key


def test_settings_of_other_backends_are_ignored_aloud(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        settings(is_host="1", read_timeout="60", slots="2")
    assert "no setting is_host, read_timeout: ignored" in caplog.text


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"settle": "-1"}, "'settle' must be seconds"),
        ({"increment": "two"}, "increment"),
        ({"password_file": "/nowhere"}, "password_file"),
        ({"local_addr": "no such host."}, "local address"),
        ({"endpoint": ""}, "endpoint must name etcd"),
    ],
)
def test_a_bad_setting_is_named(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings(**config)
