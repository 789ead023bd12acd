"""Verbs on the jobs of a cluster: a real API server and kubectl, without an operator."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.main import application, plugin
from tests.cluster.programs import programs
from tests.integration.apiserver import ApiServer
from tests.integration.kube_helpers import ELASTICJOBS_PATH, elasticjob


@pytest.fixture
def kubeconfig(api_server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Configure kubectl for the API server as its users do; local jobs are in a new folder."""
    path = api_server.kubeconfig()
    monkeypatch.setenv("PATH", f"{programs('kubernetes')}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("ELASTICJOB_PLACE", raising=False)
    return path


def asked(namespace: str, verb: str, *words: str) -> str:
    """Return the output of `kubectl elasticjob` in a namespace."""
    result = CliRunner().invoke(plugin(verb), [verb, *words, "-n", namespace])
    if isinstance(result.exception, CommandError | OSError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def names(server: ApiServer, namespace: str) -> list[str]:
    listed = server.request("GET", ELASTICJOBS_PATH.format(namespace))
    return [item["metadata"]["name"] for item in listed["items"]]


def test_job_is_applied_scaled_suspended_and_deleted(
    api_server: ApiServer, namespace: str, kubeconfig: Path, tmp_path: Path
) -> None:
    path = f"{ELASTICJOBS_PATH.format(namespace)}/job"
    manifest = tmp_path / "job.yaml"
    manifest.write_text(json.dumps(elasticjob(minNodes=1, maxNodes=5, nodeIncrement=2)))
    assert asked(namespace, "apply", "-f", str(manifest)).endswith("job created\n")
    header, row = asked(namespace, "get").splitlines()
    assert (header.split()[0], row.split()[0]) == ("NAME", "job")
    assert asked(namespace, "get", "job", "-o", "name") == "elasticjob.elasticjob.dev/job\n"
    assert "Where:      a cluster" in asked(namespace, "describe", "job")
    assert "(4 is not a legal size" in asked(namespace, "scale", "job", "--nodes", "4")
    assert api_server.request("GET", path)["spec"]["nodes"] == 4
    asked(namespace, "suspend", "job")
    assert api_server.request("GET", path)["spec"]["runPolicy"]["suspend"] is True
    asked(namespace, "resume", "job")
    assert api_server.request("GET", path)["spec"]["runPolicy"]["suspend"] is False
    with pytest.raises(CommandError, match='job "job" has no pods'):
        asked(namespace, "logs", "job")
    with pytest.raises(CommandError, match='job "job" has no events'):
        asked(namespace, "events", "job")
    asked(namespace, "delete", "job")
    assert names(api_server, namespace) == []


def test_manifest_of_standard_input_is_validated_and_applied(
    api_server: ApiServer, namespace: str, kubeconfig: Path
) -> None:
    words = ["apply", "-f", "-", "-n", namespace]
    piped = CliRunner().invoke(plugin("apply"), words, input=json.dumps(elasticjob("piped")))
    assert (piped.exit_code, names(api_server, namespace)) == (0, ["piped"]), piped.output
    wrong = json.dumps(elasticjob("wrong", minNodes=9, maxNodes=1))
    refused = CliRunner().invoke(plugin("apply"), words, input=wrong)
    assert "standard input was not applied" in str(refused.exception)
    assert names(api_server, namespace) == ["piped"]


def test_timeline_of_a_cluster_job_is_drawn_from_its_status(
    api_server: ApiServer,
    namespace: str,
    kubeconfig: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = ELASTICJOBS_PATH.format(namespace)
    api_server.request("POST", jobs, elasticjob("drawn"))
    with pytest.raises(BadInput, match='job "drawn" has had no round yet'):
        asked(namespace, "timeline", "drawn")
    rounds = [
        {"round": 1, "cause": "start", "nodes": 2, "finalTime": "2026-11-24T05:00:00Z"},
        {
            "round": 2,
            "cause": "loss",
            "members": ["drawn-1"],
            "nodes": 1,
            "finalTime": "2026-11-24T05:00:30Z",
            "recoveryMs": 400,
        },
    ]
    status = {"phase": "Running", "rounds": rounds, "explanation": ["Training on 1 of 2 nodes."]}
    api_server.patch(f"{jobs}/drawn/status", {"status": status})
    target = tmp_path / "drawn.html"
    said = asked(namespace, "timeline", "drawn", "-o", "html", "-f", str(target))
    assert said == f"wrote {target}\n"
    shown = target.read_text()
    assert "drawn: Running, 2 rounds" in shown
    assert "loss: drawn-1" in shown
    assert "0.4 s" in shown
    assert "<p>Training on 1 of 2 nodes.</p>" in shown
    with pytest.raises(OSError, match="No such file"):
        asked(namespace, "timeline", "drawn", "-f", str(tmp_path / "absent" / "drawn.svg"))
    monkeypatch.setattr("elasticjob_cli.commands.timeline.CONVERTER", "no-such-program")
    with pytest.raises(CommandError, match="no-such-program is not installed, which png requires"):
        asked(namespace, "timeline", "drawn", "-o", "png")


def test_top_lists_running_jobs_with_the_newest_step_of_their_members(
    api_server: ApiServer, namespace: str, kubeconfig: Path
) -> None:
    jobs = ELASTICJOBS_PATH.format(namespace)
    for name in ("done", "waits", "works"):
        api_server.request("POST", jobs, elasticjob(name))
    members = [
        {"pod": f"works-{number}", "state": "running", "round": 3, "step": step}
        for number, step in enumerate((41, 42))
    ]
    working = {
        "phase": "Running",
        "nodes": 2,
        "wantedNodes": 4,
        "rendezvous": {"state": "final", "round": 3, "worldSize": 16},
        "members": members,
        "snapshots": {"goodputPercent": 97},
    }
    api_server.patch(f"{jobs}/done/status", {"status": {"phase": "Succeeded"}})
    api_server.patch(f"{jobs}/works/status", {"status": working})
    titles, *rows = asked(namespace, "top").splitlines()
    assert titles.split()[:6] == ["NAME", "PHASE", "NODES", "WORKERS", "STEP", "STEPS/S"]
    assert [row.split()[0] for row in rows] == ["waits", "works"]
    assert rows[1].split() == ["works", "Running", "2/4", "16", "42", "<none>", "3", "<none>", "97"]
    (told,) = json.loads(asked(namespace, "top", "works", "-o", "json"))
    assert (told["step"], told["stepsPerSecond"], told["recoveryMs"]) == (42, None, None)
    assert told["goodputPercent"] == 97
    assert "done   Succeeded" in asked(namespace, "top", "done", "--once")
    assert asked(namespace, "top", "-o", "name").split() == [
        "elasticjob.elasticjob.dev/waits", "elasticjob.elasticjob.dev/works",
    ]  # fmt: skip


def test_finished_jobs_and_all_jobs_are_deleted(
    api_server: ApiServer, namespace: str, kubeconfig: Path
) -> None:
    jobs = ELASTICJOBS_PATH.format(namespace)
    for name in ("done", "failed", "new", "second"):
        api_server.request("POST", jobs, elasticjob(name))
    for name, phase in (("done", "Succeeded"), ("failed", "Failed")):
        api_server.patch(f"{jobs}/{name}/status", {"status": {"phase": phase}})
    assert "no job was deleted" in asked(namespace, "delete", "--finished", "new")
    asked(namespace, "delete", "--finished")
    assert names(api_server, namespace) == ["new", "second"]
    with pytest.raises(BadInput, match="--all must come without names"):
        asked(namespace, "delete", "--all", "new")
    asked(namespace, "delete", "--all")
    assert names(api_server, namespace) == []


def test_local_verb_never_acts_on_configured_cluster(
    api_server: ApiServer, namespace: str, kubeconfig: Path, tmp_path: Path
) -> None:
    api_server.request("POST", ELASTICJOBS_PATH.format(namespace), elasticjob())
    manifest = tmp_path / "job.yaml"
    manifest.write_text(json.dumps(elasticjob("other")))
    lines = [
        ["delete", "job"],
        ["scale", "job", "--nodes", "2"],
        ["suspend", "job"],
        ["resume", "job"],
        ["apply", "-f", str(manifest)],
    ]
    for words in lines:
        result = CliRunner().invoke(application(words[0]), [*words, "-n", namespace])
        assert isinstance(result.exception, CommandError), words
    CliRunner().invoke(application("delete"), ["delete", "--all", "-n", namespace])
    assert names(api_server, namespace) == ["job"]
    words = ["delete", "job", "-n", namespace, "--context", "test"]
    assert CliRunner().invoke(application("delete"), words).exit_code == 0
    assert names(api_server, namespace) == []


def test_refusals_of_the_cluster_have_no_library_text(
    api_server: ApiServer, namespace: str, kubeconfig: Path, tmp_path: Path
) -> None:
    with pytest.raises(CommandError) as refused:
        asked(namespace, "get", "nobody")
    assert str(refused.value) == (
        'the cluster\'s answer: elasticjobs.elasticjob.dev "nobody" not found'
    )
    manifest = tmp_path / "job.yaml"
    manifest.write_text(json.dumps(elasticjob(maxNodes=0)))
    with pytest.raises(BadInput, match=r"was not applied:\n.*spec.maxNodes"):
        asked(namespace, "apply", "-f", str(manifest))
    assert names(api_server, namespace) == []
