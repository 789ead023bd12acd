"""`elasticjob explain`: reading with kubectl or from the disk, and its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from elasticjob_cli.commands import cluster_logs
from elasticjob_cli.commands.cluster_reader import ClusterReader, event_line
from elasticjob_cli.commands.explain import INTERRUPTED, JUST_BEGUN
from elasticjob_cli.errors import CommandError
from elasticjob_cli.local.job_store import RUNNER_GONE, JobFolder, write_json
from elasticjob_cli.main import application, plugin
from elasticjob_operator.domain.manifests.owned_objects import owner_reference
from elasticjob_operator.domain.observed.node_state import parse_node
from elasticjob_operator.domain.observed.pod_state import observed_pod
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.status import MemberStatus, PodCounts, Status
from elasticjob_operator.model.types import ConditionStatus, ConditionType, Phase
from tests.unit.operator.builders import NOW, final_round, job, observed
from tests.unit.operator.domain.observed.raw_pods import RawPod, node

Json = dict[str, Any]

KUBECTL = """#!{python}
import json, pathlib, sys
folder = pathlib.Path({folder!r})
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
answer = folder / (sys.argv[2].partition(".")[0] + "+follow" * ("--follow" in sys.argv))
if not answer.exists():
    sys.exit(f"warning: x\\nError from server (NotFound): {{sys.argv[2]}} not found")
print(answer.read_text())
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a kubectl that answers from files in this folder, and records its calls."""
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(KUBECTL.format(python=sys.executable, folder=str(tmp_path)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


def event(when: str, reason: str, **more: Any) -> Json:
    return {"reason": reason, "message": "said", "eventTime": when, "metadata": {}, **more}


PODS = [
    RawPod(0).ready().raw,
    RawPod(1).ready().raw,
    RawPod(2).unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.").raw,
]
NODES = [node(ready="False")]


def stored() -> tuple[ElasticJob, list[str]]:
    """Return a job as the operator writes it, and its status's explanation."""
    a_job = job(minNodes=1, maxNodes=3)
    nodes = {raw["metadata"]["name"]: parse_node(raw) for raw in NODES}
    pods = tuple(pod for raw in PODS if (pod := observed_pod(raw, "trainer", nodes)) is not None)
    here = observed(*pods, view=final_round(1))
    status = next_status(a_job, here, here.rendezvous, NOW)
    return a_job.model_copy(update={"status": status}), status.explanation


def served(folder: Path, **resources: Json) -> None:
    for name, document in resources.items():
        (folder / name).write_text(json.dumps(document))


def whole(folder: Path) -> list[str]:
    a_job, said = stored()
    document = a_job.manifest()
    document["metadata"] |= {"resourceVersion": "5"}
    events = [event(f"2026-01-31T12:00:{n:02}.000000Z", f"E{n}") for n in range(8)]
    served(
        folder,
        elasticjobs=document,
        pods={"items": PODS},
        nodes=NODES[0],
        events={"items": list(reversed(events))},
    )
    return said


def calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def test_pods_without_label_are_requested_by_name(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("job-0", "job-1", "job-3", "--all", "another-1")
    members = [MemberStatus(pod=name, state="running") for name in names]
    a_job = job(Status(phase=Phase.RUNNING, members=members))
    served(kubectl, elasticjobs=a_job.manifest())
    lost, stranger = RawPod(1).ready().raw, RawPod(3).ready().raw
    lost["metadata"] |= {"labels": {}, "ownerReferences": [owner_reference(a_job)]}
    asked: list[tuple[str, ...]] = []

    def items(_: ClusterReader, *arguments: str) -> list[Json]:
        asked.append(arguments)
        if arguments[0] != "pods":
            return []
        return [RawPod(0).ready().raw] if arguments[1] == "--selector" else [lost, stranger]

    monkeypatch.setattr(ClusterReader, "items", items)
    told = ClusterReader().explain("job").sentences
    assert ("pods", "job-1", "job-3", "--ignore-not-found") in asked
    [said] = [said for said in told if " lost the labels " in said]
    assert said.startswith("job-1 has lost")


def test_cluster_job_is_explained_in_operator_phrases(kubectl: Path) -> None:
    said = whole(kubectl)
    told = ClusterReader("team-a", "ctx", Path("/kube")).explain("job")
    assert list(told.sentences) == said
    assert "job-2 is Pending: Insufficient nvidia.com/gpu" in said[0]
    assert "job-1 cannot be reached" in said[0]
    where = ["--output=json", "--request-timeout=15s", "--namespace=team-a", "--context=ctx"]
    where.append("--kubeconfig=/kube")
    assert calls(kubectl) == [
        ["get", "elasticjobs.elasticjob.dev", "job", "--show-managed-fields", *where],
        ["get", "pods", "--selector", "elasticjob.dev/job-uid=job-uid", *where],
        ["get", "nodes", "node-a", "--ignore-not-found", *where],
        ["get", "events", "--field-selector", "involvedObject.uid=job-uid", *where],
    ]


def test_status_of_a_later_operator_is_explained_without_its_unknown_parts(kubectl: Path) -> None:
    said = whole(kubectl)
    document = json.loads((kubectl / "elasticjobs").read_text())
    low = {"type": "QuotaLow", "status": "True", "reason": "Low"}
    document["status"] |= {"phase": "Paused", "launch": {"mode": "PerRack"}}
    document["status"]["conditions"].append(low)
    served(kubectl, elasticjobs=document)
    assert list(ClusterReader().explain("job").sentences) == said


def test_newest_events_come_last(kubectl: Path) -> None:
    whole(kubectl)
    assert ClusterReader().explain("job").events == tuple(
        f"12:00:0{n} E{n}: said" for n in range(3, 8)
    )


def test_missing_permission_for_nodes_and_events_still_explains_job(kubectl: Path) -> None:
    whole(kubectl)
    (kubectl / "nodes").unlink()
    (kubectl / "events").unlink()
    told = ClusterReader().explain("job")
    assert told.events == ()
    assert "job-2 is Pending: Insufficient nvidia.com/gpu" in told.sentences[0]
    assert "job-1 is starting" in told.sentences[0], "its node is taken for ready"


def test_unknown_job(kubectl: Path) -> None:
    with pytest.raises(CommandError, match=r"^the cluster's answer: elasticjobs"):
        ClusterReader().explain("job")
    asked = calls(kubectl)
    result = CliRunner().invoke(application("explain"), ["explain", "job"])
    assert isinstance(result.exception, CommandError)
    assert str(result.exception).startswith('local job "job" not found')
    assert calls(kubectl) == asked, "a cluster is read only if it is asked for"


@pytest.mark.parametrize("name", ["--all", "-n", "a b", "", "A"])
def test_name_is_no_option_of_kubectl(kubectl: Path, name: str) -> None:
    for verb in ("explain", "get", "delete", "suspend", "rounds"):
        result = CliRunner().invoke(plugin(verb), [verb, "--", name])
        assert isinstance(result.exception, CommandError | SystemExit)
    assert not (kubectl / "calls").exists() or not name


def test_missing_kubectl(kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(kubectl))
    with pytest.raises(CommandError, match="kubectl was not found on PATH"):
        ClusterReader().explain("job")


def test_job_of_another_release(kubectl: Path) -> None:
    a_job, _ = stored()
    document = a_job.manifest()
    document["spec"]["warpNodes"] = 5
    served(kubectl, elasticjobs=document)
    with pytest.raises(CommandError, match=r"another release: .*warpNodes"):
        ClusterReader().explain("job")


@pytest.mark.parametrize(
    ("times", "line"),
    [
        ({"eventTime": "2026-01-31T13:00:00.5+01:00"}, "12:00:00 Why: said"),
        ({"eventTime": None, "lastTimestamp": "2026-01-31T12:00:01Z"}, "12:00:01 Why: said"),
        ({"series": {"lastObservedTime": "2026-01-31T12:00:02Z"}}, "12:00:02 Why: said"),
        ({"message": ""}, "12:00:09 Why"),
    ],
)
def test_event_time(times: Json, line: str) -> None:
    assert event_line(event("2026-01-31T12:00:09Z", "Why") | times) == line


# -- on this machine ----------------------------------------------------------------


def local(**changes: Any) -> JobFolder:
    a_job, _ = stored()
    folder = JobFolder("default", "job")
    folder.path.mkdir(parents=True, exist_ok=True)
    status = a_job.status.model_copy(update=changes)
    write_json(folder.status_file, a_job.model_copy(update={"status": status}).manifest())
    return folder


def test_local_job_is_explained_in_runner_phrases(kubectl: Path) -> None:
    local()
    result = CliRunner().invoke(application("explain"), ["explain", "job"])
    assert result.output.splitlines()[0] == RUNNER_GONE
    assert not (kubectl / "calls").exists(), "this machine's job comes before the cluster's"


def test_ended_local_job_is_not_abandoned(kubectl: Path) -> None:
    local(phase=Phase.SUCCEEDED, explanation=["Succeeded."])
    assert explained() == ["Succeeded."]


def explained() -> list[str]:
    return CliRunner().invoke(application("explain"), ["explain", "job"]).output.splitlines()


@pytest.mark.parametrize(
    ("phase", "held", "said"),
    [
        (Phase.SUSPENDED, False, INTERRUPTED),  # runPolicy.suspend cannot be set here
        (Phase.SUSPENDED, True, INTERRUPTED),
        (None, True, JUST_BEGUN),
        (None, False, RUNNER_GONE),
    ],
)
def test_local_job_does_not_wait_for_an_operator(
    kubectl: Path, phase: Phase | None, held: bool, said: str
) -> None:
    folder = local()
    if held:
        folder.acquire()
    local(phase=phase, explanation=["Ask the operator."])
    assert explained() == [said]
    folder.release()


def test_local_job_without_runner_is_interrupted_and_trains_on_no_node(kubectl: Path) -> None:
    a_job, _ = stored()
    pods = PodCounts(desired=2, active=2, ready=2)
    running = {"phase": Phase.RUNNING, "nodes": 2, "pods": pods, "ready_nodes": 2}
    folder = local(**running)
    folder.acquire()
    local(**running)
    shown = ElasticJob.model_validate(folder.object()).status
    assert (shown.phase, shown.nodes, shown.pods) == (Phase.RUNNING, 2, pods)
    folder.release()
    shown = ElasticJob.model_validate(folder.object()).status
    assert (shown.phase, shown.nodes, shown.pods) == (Phase.INTERRUPTED, 0, PodCounts())
    assert shown.members == []
    assert not any(
        one.type is ConditionType.RUNNING and one.status is ConditionStatus.TRUE
        for one in shown.conditions
    )
    assert shown.restarts == a_job.status.restarts
    table = CliRunner().invoke(application("get"), ["get"]).stdout
    assert "Interrupted" in table
    assert "Running" not in table


def test_get_and_describe_report_lost_runner(kubectl: Path) -> None:
    local()
    result = CliRunner().invoke(application("get"), ["get"])
    assert result.stderr.splitlines() == [f"job: {RUNNER_GONE}"]
    assert RUNNER_GONE in CliRunner().invoke(application("describe"), ["describe", "job"]).output
    local(phase=Phase.SUCCEEDED)
    assert CliRunner().invoke(application("get"), ["get"]).stderr == ""


def test_get_lists_other_jobs_beside_unreadable_job(kubectl: Path) -> None:
    local(phase=Phase.SUCCEEDED)
    folder = JobFolder("default", "broken")
    folder.path.mkdir()
    folder.status_file.write_text("{")
    result = CliRunner().invoke(application("get"), ["get"])
    cells = [line.split()[:2] for line in result.stdout.splitlines()]
    assert cells == [["NAME", "PHASE"], ["broken", "<unreadable>"], ["job", "Succeeded"]]
    assert 'the status of local job "broken" cannot be read' in result.stderr
    assert result.exit_code == 1
    alone = CliRunner().invoke(application("get"), ["get", "broken"])
    assert (alone.exit_code, alone.stdout) == (1, "")
    assert 'the status of local job "broken" cannot be read' in alone.stderr


@pytest.mark.parametrize("options", [["--cluster"], ["--context", "c"], ["--kubeconfig", "k"]])
def test_cluster_can_be_selected_despite_local_job(kubectl: Path, options: list[str]) -> None:
    local()
    said = whole(kubectl)
    result = CliRunner().invoke(application("explain"), ["explain", "job", *options])
    assert result.output.splitlines()[: len(said)] == said
    assert "The newest events:" in result.output


def test_kubectl_plugin_selects_the_cluster(kubectl: Path) -> None:
    local()
    said = whole(kubectl)
    result = CliRunner().invoke(plugin("explain"), ["explain", "job", "-n", "team-a"])
    assert result.output.splitlines()[: len(said)] == said
    assert "--namespace=team-a" in calls(kubectl)[0]


def test_local_option_ignores_cluster_jobs(kubectl: Path) -> None:
    whole(kubectl)
    result = CliRunner().invoke(application("explain"), ["explain", "job", "--local"])
    assert isinstance(result.exception, CommandError)
    assert "local job" in str(result.exception)


# -- logs of a cluster --------------------------------------------------------------


def test_logs_of_pods_are_merged_selected_and_neutralised(kubectl: Path) -> None:
    whole(kubectl)
    second = "2026-01-31T12:00:0"
    for name, lines in (
        ("job-0", [f"{second}1Z [0] one", f"{second}3Z [0] \x1b[2Jthree"]),
        ("job-1", [f"{second}2Z [1] two"]),
        ("job-0+follow", [f"{second}3Z [0] three", f"{second}5Z [0] five"]),
        ("job-1+follow", [f"{second}4Z [1] four"]),
    ):
        (kubectl / name).write_text("\n".join(lines))

    def said(*words: str) -> list[str]:
        result = CliRunner().invoke(plugin("logs"), ["logs", "job", *words])
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()

    assert said() == [
        "job-0 [0] one", "job-1 [1] two", "job-0 [0] \\x1b[2Jthree",
    ]  # fmt: skip
    assert said("--rank", "1", "--timestamps") == [f"{second}2.000000000Z job-1 [1] two"]
    assert said("--tail", "2")[0] == "job-1 [1] two"
    document = json.loads((kubectl / "elasticjobs").read_text())
    document["status"] |= {"phase": "Succeeded"}
    document["status"]["rounds"] = [
        {"round": 6, "cause": "start", "nodes": 1, "finalTime": f"{second}0Z"},
        {"round": 7, "cause": "loss", "members": ["a"], "nodes": 2, "finalTime": f"{second}4Z"},
    ]
    served(kubectl, elasticjobs=document)
    assert said("--tail", "1") == ["job-0 [0] \\x1b[2Jthree"]
    first, mark, *later = said("-f", "--tail", "1")
    assert first == "job-0 [0] \\x1b[2Jthree"
    assert mark == "[elasticjob] round 7 begins: 2 nodes; cause loss: a"
    # Two processes write them: a busy machine delays either.
    assert sorted(later) == ["job-0 [0] five", "job-1 [1] four"]
    assert said("--round", "6", "--rank", "1")[1:] == ["job-1 [1] two"]
    unknown = CliRunner().invoke(plugin("logs"), ["logs", "job", "--round", "8"])
    assert "there is no round 8; rounds: 6, 7" in str(unknown.exception)
    unknown = CliRunner().invoke(plugin("logs"), ["logs", "job", "--pod", "x"])
    assert "pods: job-0, job-1, job-2" in str(unknown.exception)


def test_logs_of_other_pods_are_printed_beside_those_that_cannot_be_read(kubectl: Path) -> None:
    whole(kubectl)
    (kubectl / "job-1").write_text("2026-01-31T12:00:02Z [1] two")
    result = CliRunner().invoke(plugin("logs"), ["logs", "job"])
    assert result.stdout.splitlines() == ["job-1 [1] two"]
    assert isinstance(result.exception, CommandError)
    assert str(result.exception).splitlines() == [
        "the logs of some pods cannot be read:",
        "job-0: the cluster's answer: job-0 not found",
    ]
    result = CliRunner().invoke(plugin("logs"), ["logs", "job", "--pod", "job-0"])
    assert str(result.exception) == "the cluster's answer: job-0 not found"


def test_followed_logs_name_pods_that_cannot_be_read(kubectl: Path) -> None:
    a_job = json.loads(json.dumps(stored()[0].manifest()))
    a_job["status"] |= {"phase": "Succeeded"}
    whole(kubectl)
    served(kubectl, elasticjobs=a_job)
    for name in ("job-1", "job-0+follow", "job-1+follow"):
        (kubectl / name).write_text("2026-01-31T12:00:02Z [1] two")
    result = CliRunner().invoke(plugin("logs"), ["logs", "job", "-f"])
    assert result.exit_code == 0, result.output
    assert sorted(result.stdout.splitlines()) == ["job-0 [1] two", "job-1 [1] two"]
    assert "elasticjob: job-0: the cluster's answer: job-0 not found" in result.stderr


@pytest.mark.parametrize("had_log", [False, True])
def test_followed_logs_end_after_the_job_with_a_pod_that_cannot_be_read(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch, had_log: bool
) -> None:
    a_job = json.loads(json.dumps(stored()[0].manifest()))
    a_job["status"] |= {"phase": "Succeeded"}
    whole(kubectl)
    served(kubectl, elasticjobs=a_job)
    for name in ("job-0", "job-1", "job-1+follow")[not had_log :]:
        (kubectl / name).write_text("2026-01-31T12:00:02Z [1] two")
    followed: list[str] = []

    def started(command: list[str], **options: Any) -> subprocess.Popen[str]:
        followed.append(command[2])
        assert followed.count("job-0") < 3, "followed again and again"
        return subprocess.Popen(command, **options)

    counted = SimpleNamespace(Popen=started, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(cluster_logs, "subprocess", counted)
    monkeypatch.setattr(cluster_logs, "LIST_SECONDS", 0.05)
    monkeypatch.setattr(cluster_logs, "BATCH_SECONDS", 0.01)
    result = CliRunner().invoke(plugin("logs"), ["logs", "job", "-f"])
    assert sorted(followed) == ["job-0", "job-1"]
    assert isinstance(result.exception, CommandError), result.exception
    assert str(result.exception).splitlines() == [
        "the logs of some pods cannot be read:",
        "job-0: `kubectl logs` has ended with exit code 1"
        if had_log
        else "job-0: the cluster's answer: job-0 not found",
    ]
