"""Choice of the place of a verb, unknown verbs, the listing, and the merged logs of pods."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.kubectl import Answer, selects_cluster
from elasticjob_cli.log_lines import duration, merged, parsed_lines
from elasticjob_cli.main import (
    CLUSTER_COMMANDS,
    COMMANDS,
    HELPS,
    SYNONYMS,
    application,
    unknown_command,
)


@pytest.mark.parametrize(
    ("is_plugin", "cluster", "context", "kubeconfig", "default", "wanted"),
    [
        (False, None, None, None, None, False),
        (False, None, None, None, "local", False),
        (False, None, None, None, "cluster", True),
        (False, False, None, None, "cluster", False),
        (False, True, None, None, None, True),
        (False, None, "prod", None, None, True),
        (False, None, None, Path("k"), "local", True),
        (True, None, None, None, "local", True),
    ],
)
def test_verb_acts_on_cluster_only_if_asked(
    monkeypatch: pytest.MonkeyPatch,
    is_plugin: bool,
    cluster: bool | None,
    context: str | None,
    kubeconfig: Path | None,
    default: str | None,
    wanted: bool,
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/a/kubeconfig")  # never decides
    monkeypatch.delenv("ELASTICJOB_PLACE", raising=False)
    if default is not None:
        monkeypatch.setenv("ELASTICJOB_PLACE", default)
    assert selects_cluster(is_plugin, cluster, context, kubeconfig) is wanted


@pytest.mark.parametrize(
    ("is_plugin", "context", "kubeconfig"),
    [(True, None, None), (False, "prod", None), (False, None, Path("k"))],
)
def test_local_contradicts_cluster_options(
    is_plugin: bool, context: str | None, kubeconfig: Path | None
) -> None:
    with pytest.raises(BadInput):
        selects_cluster(is_plugin, False, context, kubeconfig)


def test_unknown_default_place_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTICJOB_PLACE", "cloud")
    with pytest.raises(CommandError, match="must be local or cluster, not 'cloud'"):
        selects_cluster(False, None, None, None)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        (
            "Error in configuration: context was not found for specified context: prod",
            "the kubeconfig has no context 'prod': `kubectl config get-contexts` lists them",
        ),
        (
            'error: context "prod" does not exist',
            "the kubeconfig has no context 'prod': `kubectl config get-contexts` lists them",
        ),
        (
            "error: stat /nope: no such file or directory",
            "the kubeconfig '/nope' cannot be read: no such file or directory",
        ),
        (
            'error: error loading config file "/tmp": read /tmp: is a directory',
            "the kubeconfig '/tmp' cannot be read: is a directory",
        ),
        (
            "The connection to the server localhost:8080 was refused - did you specify the "
            "right host or port?",
            "no cluster is configured: give a context or a kubeconfig",
        ),
        (
            'Error from server (NotFound): elasticjobs.elasticjob.dev "x" not found',
            'the cluster\'s answer: elasticjobs.elasticjob.dev "x" not found',
        ),
        (
            "error: invalid character '<' looking for beginning of value",
            "the cluster's answer: invalid character '<' looking for beginning of value; this is "
            "not the answer of an API server: check the cluster's address with `kubectl "
            "cluster-info`, and proxies on the way",
        ),
        (
            "error: getting credentials: decoding stdout: unexpected end of JSON input",
            "the cluster's answer: getting credentials: decoding stdout: unexpected end of JSON "
            "input; check the exec plug-in of the user in the kubeconfig",
        ),
        (
            'Error from server (InternalError): an error on the server ("<html>Bad gateway'
            '</html>") has prevented the request from succeeding',
            'the cluster\'s answer: an error on the server ("<html>Bad gateway</html>") has '
            "prevented the request from succeeding; this is not the answer of an API server: check "
            "the cluster's address with `kubectl cluster-info`, and proxies on the way",
        ),
        (
            "Error from server (Forbidden): unknown",
            "the cluster's answer: Forbidden; ask the cluster's administrator for this permission",
        ),
        (
            "Error from server (ServiceUnavailable): the server is currently unable to handle the "
            "request",
            "the cluster's answer: the server is currently unable to handle the request; try "
            "again; if it lasts, check the API server and its etcd",
        ),
    ],
)
def test_errors_of_the_kubeconfig_are_own_texts(said: str, shown: str) -> None:
    with pytest.raises(CommandError) as error:
        Answer("", (said,)).check()
    assert str(error.value) == shown


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["a", "3"], "`elasticjob scale a --nodes 3`"),
        (["a", "b"], "`elasticjob scale a b --nodes NUMBER`"),
        (["a"], "`elasticjob scale a --nodes NUMBER`"),
        (["7"], "`elasticjob scale 7 --nodes NUMBER`"),
    ],
)
def test_scale_without_a_number_of_nodes_shows_the_command(words: list[str], shown: str) -> None:
    result = CliRunner().invoke(application("scale"), ["scale", *words])
    assert isinstance(result.exception, BadInput)
    assert str(result.exception).endswith(shown)


@pytest.mark.parametrize(
    ("word", "verb"),
    [
        ("lst", "get"),
        ("statsu", "get"),
        ("stop", "suspend"),
        ("submit", "apply"),
        ("descrbe", "describe"),
        ("train.py", "run train.py"),
    ],
)
def test_wrong_verb_suggests_the_right_one(word: str, verb: str) -> None:
    assert unknown_command(word, COMMANDS).endswith(f"did you mean `{verb}`?")


def test_plugin_names_the_program_of_a_local_verb() -> None:
    assert "`-h` shows the help" in unknown_command("help", CLUSTER_COMMANDS)
    assert "use `elasticjob run`" in unknown_command("run", CLUSTER_COMMANDS)
    assert "commands: " in unknown_command("\x1b[2J", CLUSTER_COMMANDS)
    assert "\x1b" not in unknown_command("\x1b[2J", CLUSTER_COMMANDS)


def test_every_command_has_a_line_of_80_columns() -> None:
    assert list(HELPS) == list(COMMANDS)
    assert set(SYNONYMS.values()) <= set(COMMANDS)
    assert SYNONYMS.keys().isdisjoint(COMMANDS)
    assert all(len(text) <= 66 for text in HELPS.values())


def test_lines_of_pods_are_merged_by_time() -> None:
    one = ["2026-01-31T12:00:00.5Z a", "no time", "2026-01-31T12:00:02.000000001Z c"]
    two = ["2026-01-31T12:00:00.500000001Z b", "2026-01-31T12:00:02Z ", "2026-01-31T12:00:03Z d"]
    found = merged([parsed_lines("job-0", one), parsed_lines("job-1", two)])
    assert [(line.pod[-1], line.text) for line in found] == [
        ("0", "a"), ("0", "no time"), ("1", "b"), ("1", ""), ("0", "c"), ("1", "d"),
    ]  # fmt: skip


@pytest.mark.parametrize(("text", "seconds"), [("10m", 600), ("1h30m", 5400), ("30s", 30)])
def test_since_is_a_duration(text: str, seconds: int) -> None:
    assert duration(text).total_seconds() == seconds


@pytest.mark.parametrize("text", ["5", "", "1d", "-1s", "999999999h", "x\x1b"])
def test_other_words_are_no_duration(text: str) -> None:
    with pytest.raises(BadInput, match="--since must be"):
        duration(text)
