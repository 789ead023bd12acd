"""Launcher's settings: defaults, and errors that name the variable and the fix."""

from __future__ import annotations

import signal

import pytest

from elasticjob_launcher.settings import (
    OWN_VARIABLES,
    Limits,
    SettingsError,
    check_socket_path,
    read_settings,
    worker_environment,
)


def test_defaults() -> None:
    settings = read_settings(["--", "python3", "train.py", "--"], {})
    assert settings.argv == ("python3", "train.py", "--")
    assert settings.socket_path == "/elasticjob/launcher.sock"
    assert (settings.probe_port, settings.orphan_seconds, settings.stop_grace_seconds) == (
        0,
        30,
        10,
    )
    assert settings.agent_fd is None
    assert settings.zygote == Limits(seconds=60, most_bytes=4 * 1024**3)


def test_launcher_below_an_agent_needs_no_command() -> None:
    settings = read_settings([], {"ELASTICJOB_AGENT_FD": "7", "ELASTICJOB_PROBE_PORT": "off"})
    assert (settings.argv, settings.agent_fd, settings.probe_port) == ((), 7, None)


@pytest.mark.parametrize("arguments", [[], ["--"], ["train"], ["train", "--"]])
def test_missing_command_shows_usage(arguments: list[str]) -> None:
    with pytest.raises(SettingsError, match=r"usage: python3 launcher\.pyz .*-- COMMAND"):
        read_settings(arguments, {})


def test_setup_and_preparation_are_read_before_the_command() -> None:
    words = ["--setup", "3", "pip", "install", "--", "--prepare", "--", "sh", "-c", "x"]
    settings = read_settings(words, {})
    assert settings.setup == ("pip", "install", "--")
    assert settings.prepare
    assert settings.argv == ("sh", "-c", "x")


@pytest.mark.parametrize("count", [[], ["x"], ["0"], ["3", "a", "b"], ["-1", "a"]])
def test_wrong_number_of_setup_words_is_refused(count: list[str]) -> None:
    with pytest.raises(SettingsError, match="--setup must be followed by a number of words"):
        read_settings(["--setup", *count], {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ELASTICJOB_PROBE_PORT", "65536"),
        ("ELASTICJOB_PROBE_PORT", "http"),
        ("ELASTICJOB_PROBE_PORT", "٣"),
        ("ELASTICJOB_ORPHAN_SECONDS", "soon"),
        ("ELASTICJOB_ORPHAN_SECONDS", "nan"),
        ("ELASTICJOB_STOP_GRACE_SECONDS", "-1"),
        ("ELASTICJOB_LIFELINE_PID", "-5"),
        ("ELASTICJOB_STANDBY_SECONDS", "1m"),
        ("ELASTICJOB_SAVE_SIGNAL", "KILL"),
        ("ELASTICJOB_SAVE_SIGNAL", "10"),
        ("ELASTICJOB_NESTED_LAUNCH", "Refuse"),
        ("ELASTICJOB_NESTED_LAUNCH", "1"),
        ("ELASTICJOB_STANDBY_MIB", "4Gi"),
        ("ELASTICJOB_AGENT_FD", "x"),
        ("ELASTICJOB_SOCKET", "/" + "x" * 107),
    ],
)
def test_invalid_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(SettingsError, match=name):
        read_settings(["--", "train"], {name: value})


@pytest.mark.parametrize("name", ["USR1", "SIGUSR1"])
def test_checkpoint_signal(name: str) -> None:
    environ = {"ELASTICJOB_SAVE_SIGNAL": name}
    assert read_settings(["--", "train"], environ).save_signal == signal.SIGUSR1
    assert worker_environment(environ) == environ, "a script may look which it is to handle"


def test_longest_socket_path() -> None:
    check_socket_path("/" + "ü" * 53)  # 107 bytes
    with pytest.raises(SettingsError, match="108 bytes long"):
        check_socket_path("/" + "ü" * 53 + "x")


def test_workers_do_not_inherit_launcher_variables() -> None:
    environ = dict.fromkeys(OWN_VARIABLES, "1") | {"PATH": "/bin", "ELASTICJOB_X": "y"}
    assert worker_environment(environ) == {"PATH": "/bin", "ELASTICJOB_X": "y"}


def test_value_for_the_workers_of_a_pod_is_none_of_a_launcher_below_an_agent() -> None:
    environ = {"ELASTICJOB_AGENT_FD": "7", "ELASTICJOB_NESTED_LAUNCH": "1"}
    assert read_settings([], environ).agent_fd == 7
