"""Operator's view of the rendezvous and its writes to it; the test plays the agents."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elasticjob_operator.domain.plan.launch_failures import MOST_LAUNCH_FAILURES
from elasticjob_rendezvous.protocol.records.failures import Failure, FailureClass
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind, Outcome, OutcomeKind
from tests.integration.apiserver import ApiServer
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.operator.agent_records import Agents, running
from tests.integration.operator_rig import SECONDS, Namespace, Operator, alone_in

_TAKEOVER_SECONDS = 60.0
_STATUS_SECONDS = 5.0
"""Timeout; the guaranteed second is measured on a cluster, this machine may be busy."""


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    server = EtcdServer(tmp_path / "etcd")
    try:
        yield server.start()
    finally:
        server.close()


@pytest.fixture
def operator(
    tmp_path: Path, api_server: ApiServer, etcd: EtcdServer, namespace: str
) -> Iterator[Operator]:
    options = alone_in(namespace)
    replica = Operator(tmp_path, api_server, etcd, options=options)
    with replica.running():
        yield replica


@pytest.fixture
def ns(api_server: ApiServer, namespace: str, operator: Operator) -> Namespace:
    return Namespace(api_server, namespace)


def test_status_follows_rendezvous(ns: Namespace, etcd: EtcdServer, operator: Operator) -> None:
    agents = running(ns, etcd, 2)

    def seen() -> dict[str, object]:
        found = ns.status()["rendezvous"]
        return {key: found.get(key) for key in ("state", "round", "nodes", "worldSize", "master")}

    whole = {"state": "final", "round": 1, "nodes": 2, "worldSize": 2, "master": "job-0"}
    wait_until(lambda: seen() == whole, f"{whole}, is {seen()}", SECONDS)
    status = ns.status()
    assert [(one["pod"], one["rank"]) for one in status["members"]] == [("job-0", 0), ("job-1", 1)]
    assert status["rounds"][0]["detectMs"] == 5
    agents.seal(2, Cause(CauseKind.LEAVE, ("job-1",), "drained"))
    wait_until(lambda: len(ns.status()["rounds"]) == 2, "the second round", SECONDS)
    told = "round 2 is final with 2 nodes: job-1 left (drained); detect 5 ms, stop 120 ms"
    wait_until(lambda: any(told in text for _, text in ns.events()), told, SECONDS)
    assert operator.metric("elasticjob_rounds_total", cause="start") == 1
    lag = operator.metric("elasticjob_status_lag_seconds_sum")
    count = operator.metric("elasticjob_status_lag_seconds_count")
    assert count > 0
    assert lag / count < _STATUS_SECONDS


def test_member_of_deleted_pod_is_removed_at_once(ns: Namespace, etcd: EtcdServer) -> None:
    agents = running(ns, etcd, 2)
    key = agents.keys.sessions(agents.members["job-1"])
    assert etcd.ctl("get", "--prefix", key)
    ns.remove_pod("job-1")
    wait_until(lambda: not etcd.ctl("get", "--prefix", key), "no member any more", SECONDS)
    ns.await_event("MembersRemoved", "1 member removed from the rendezvous: its pod is gone")
    # Its index was free only after it had gone.
    wait_until(lambda: len(ns.pods()) == 2, "a replacement", SECONDS)


def test_pod_gets_drain_request_before_deletion(ns: Namespace, etcd: EtcdServer) -> None:
    agents = running(ns, etcd, 2)
    ns.server.patch(ns.path("pods", "job-1"), {"metadata": {"finalizers": ["test/keep"]}})
    ns.scale(1)
    wait_until(
        lambda: "SurplusHighestRank" in etcd.ctl("get", agents.keys.bounds),
        "a drain request",
        SECONDS,
    )
    ns.await_event("PodsDeleted", "deleted job-1: more than wanted; had the highest rank")
    ns.server.patch(ns.path("pods", "job-1"), {"metadata": {"finalizers": None}})
    ns.await_pods("job-0")
    ns.await_status(pods=1)


def test_first_failure_is_shown_in_status_and_events(ns: Namespace, etcd: EtcdServer) -> None:
    agents = running(ns, etcd, 2)
    failure = Failure(
        1, agents.members["job-1"], "job-1", 1, 0, FailureClass.USER_ERROR, 1, exit_code=1,
        message="ValueError: no", traceback="Traceback …\n  line\nValueError: no", node="node-b",
    )  # fmt: skip
    agents.put(agents.keys.failure(1, agents.members["job-1"]), failure)
    agents.charged = (1,)
    agents.close(2, Outcome(OutcomeKind.FAILED, "spent"))
    ns.await_status(phase="Failed", restarts=1)
    found = ns.status()["firstFailure"]
    assert (found["pod"], found["rank"], found["exitCode"]) == ("job-1", 1, 1)
    assert "ValueError" in found["traceback"]
    ns.await_event("Failed", "WorkersFailed: spent")
    wait_until(lambda: "WorkerFailed" in dict(ns.events()), "the worker's event", SECONDS)
    told = dict(ns.events())
    assert told["WorkerFailed"].startswith("rank 1 (job-1 on node-b) failed in round 1 with exit")
    assert ns.condition("Finished")["status"] == "True"


def test_success_finishes_job_and_releases_its_pods(ns: Namespace, etcd: EtcdServer) -> None:
    agents = running(ns, etcd, 2)
    agents.close(1, Outcome(OutcomeKind.SUCCEEDED))
    ns.await_status(phase="Succeeded")
    wait_until(lambda: ns.get("poddisruptionbudgets", "job") is None, "no budget", SECONDS)


def test_etcd_outage_is_reported_and_recovered_from(
    ns: Namespace, etcd: EtcdServer, operator: Operator
) -> None:
    running(ns, etcd, 2)
    before = ns.status()
    etcd.kill()
    wait_until(lambda: ns.status()["rendezvous"]["state"] == "Unknown", "Unknown", SECONDS)
    assert ns.status()["phase"] == "Running"
    assert ns.status()["members"] == before["members"]
    assert ns.pods() == ["job-0", "job-1"]
    etcd.start()
    wait_until(lambda: ns.status()["rendezvous"]["state"] == "final", "final", SECONDS)
    assert operator.page("/healthz")[0] == 200


def statuses(ns: Namespace, since: str) -> list[dict[str, Any]]:
    """Return every status written to the namespace's jobs after a resourceVersion."""
    query = f"?watch=true&resourceVersion={since}&timeoutSeconds=1"
    said = ns.server.fetch("GET", ns.path("elasticjobs") + query).decode().splitlines()
    return [json.loads(line)["object"]["status"] for line in said]


def test_parameters_are_rewritten_after_etcd_data_loss(ns: Namespace, etcd: EtcdServer) -> None:
    agents = running(ns, etcd, 1)
    since = ns.job()["metadata"]["resourceVersion"]
    etcd.kill()
    etcd.wipe()
    etcd.start()
    wait_until(lambda: bool(etcd.ctl("get", agents.keys.bounds)), "bounds", SECONDS)
    assert ns.pods() == ["job-0"]
    wait_until(lambda: ns.status()["rendezvous"]["state"] == "Unknown", "Unknown", SECONDS)
    agents.seal(1, Cause(CauseKind.START))
    wait_until(lambda: ns.status()["rendezvous"]["state"] == "final", "final", SECONDS)
    assert {one["phase"] for one in statuses(ns, since)} == {"Running"}, "workers train on"


def test_suspension_is_reported_completely(ns: Namespace, etcd: EtcdServer) -> None:
    """The operator itself closes the rendezvous: it waits until it reads the closed record."""
    running(ns, etcd, 2)
    since = ns.job()["metadata"]["resourceVersion"]
    ns.patch_job({"spec": {"runPolicy": {"suspend": True}}})
    ns.await_status(phase="Suspended")
    seen = [(one["phase"], one["rendezvous"]["state"]) for one in statuses(ns, since)]
    stages = [("Running", "final"), ("Suspending", "closed"), ("Suspended", "closed")]
    assert list(dict.fromkeys(seen)) == stages, seen


def test_job_resumed_during_etcd_outage_waits_for_etcd(ns: Namespace, etcd: EtcdServer) -> None:
    """The resumed job's pods would belong to the suspended gang, and end at once."""
    running(ns, etcd, 2)
    ns.patch_job({"spec": {"runPolicy": {"suspend": True}}})
    ns.await_status(phase="Suspended")
    ns.await_pods()
    etcd.kill()
    ns.patch_job({"spec": {"runPolicy": {"suspend": False}}})
    wait_until(lambda: ns.status()["rendezvous"]["state"] == "Unknown", "Unknown", SECONDS)
    assert ns.pods() == []
    etcd.start()
    wait_until(lambda: ns.pods() == ["job-0", "job-1"], "pods", _TAKEOVER_SECONDS)
    labels = ns.present("pods", "job-0")["metadata"]["labels"]
    assert labels["elasticjob.dev/incarnation"] == "2"


def test_killed_operator_catches_up(ns: Namespace, etcd: EtcdServer, operator: Operator) -> None:
    agents = running(ns, etcd, 2)
    operator.kill()
    agents.seal(2, Cause(CauseKind.FAILURE, ("job-1",)))
    operator.start()

    def caught_up() -> bool:
        return bool(ns.status()["rendezvous"]["round"] == 2)

    wait_until(caught_up, "round 2", _TAKEOVER_SECONDS)
    assert ns.pods() == ["job-0", "job-1"]


def test_successor_posts_events_of_killed_operator_once(
    ns: Namespace, etcd: EtcdServer, operator: Operator
) -> None:
    agents = running(ns, etcd, 2)
    agents.seal(2, Cause(CauseKind.LEAVE, ("job-1",), "drained"))
    agents.close(2, Outcome(OutcomeKind.SUCCEEDED))
    ns.await_event("Succeeded", "all workers ended with success")
    wait_until(lambda: _event_counts(ns)["RoundFinal"] == 2, "both rounds", SECONDS)
    before = _event_counts(ns)
    operator.kill()
    lost = [raw for raw in ns.all("events") if "round 2 is final" in raw["note"]]
    lost += [raw for raw in ns.all("events") if raw["reason"] == "Succeeded"]
    assert len(lost) == 2
    for raw in lost:  # as if it had been killed between its status and these
        ns.server.request("DELETE", ns.path("events", raw["metadata"]["name"]))
    operator.start()
    wait_until(lambda: _event_counts(ns) == before, f"{before} again", _TAKEOVER_SECONDS)
    operator.stop()  # it first posts all pending events
    assert _event_counts(ns) == before


def _event_counts(ns: Namespace) -> Counter[str]:
    """Count the reasons of the events about the status."""
    said = ("RoundFinal", "Recovered", "Succeeded", "WorkerFailed", "Failed")
    return Counter(reason for reason, _ in ns.events() if reason in said)


def test_job_finished_without_operator_is_deleted_after_time_to_live(
    ns: Namespace, etcd: EtcdServer, operator: Operator
) -> None:
    """No further event would make the operator reconcile it."""
    agents = running(ns, etcd, 1)
    ns.patch_job({"spec": {"runPolicy": {"ttlSecondsAfterFinished": 3}}})
    operator.kill()
    agents.close(1, Outcome(OutcomeKind.SUCCEEDED))
    ns.remove_pod("job-0")
    operator.start()
    wait_until(lambda: ns.get("elasticjobs", "job") is None, "the job's end", _TAKEOVER_SECONDS)


def _never_ready(ns: Namespace, name: str, exit_code: int | None = None) -> None:
    """Report a trainer whose pod was never Ready, running or ended with this exit code."""
    created, started = "2026-01-31T12:00:00Z", "2026-01-31T12:00:05Z"
    state: dict[str, Any] = {"running": {"startedAt": started}}
    if exit_code is not None:
        ended = {"startedAt": started, "finishedAt": "2026-01-31T23:00:00Z", "exitCode": exit_code}
        state = {"terminated": ended | {"reason": "Error"}}
    status = {"name": "trainer", "image": "t:1", "imageID": "", "ready": False, "restartCount": 0}
    unready = {"type": "Ready", "status": "False", "lastTransitionTime": created}
    ns.set_pod(
        name,
        phase="Running" if exit_code is None else "Failed",
        containerStatuses=[status | {"state": state}],
        conditions=[unready],
    )


def _exists(ns: Namespace, pod: str) -> bool:
    return pod in ns.pods()


def _is_only_member(ns: Namespace, pod: str) -> bool:
    return [one["pod"] for one in ns.status()["members"]] == [pod]


def test_failures_of_members_that_were_never_ready_do_not_fail_the_launch(
    ns: Namespace, etcd: EtcdServer
) -> None:
    ns.create_job(minNodes=1, maxNodes=1)
    agents = Agents(etcd, ns)
    names = [f"job-{index}" for index in range(MOST_LAUNCH_FAILURES + 1)]
    for name in names:
        wait_until(partial(_exists, ns, name), name, SECONDS)
        _never_ready(ns, name)
        agents.join(name)
        wait_until(partial(_is_only_member, ns, name), f"member {name}", SECONDS)
        if name != names[-1]:
            _never_ready(ns, name, exit_code=137)
    assert ns.status()["phase"] == "Pending"
    assert ns.condition("Failed")["status"] == "False"


def test_pod_is_expected_while_its_image_is_pulled_and_not_once_that_fails(
    ns: Namespace, etcd: EtcdServer
) -> None:
    ns.create_job(minNodes=1, maxNodes=2, elasticity={"pendingTimeoutSeconds": 1})
    ns.await_pods("job-0", "job-1")
    ns.run_pod("job-0")
    bounds = Agents(etcd, ns).keys.bounds

    def expected() -> int | None:
        found = etcd.ctl("get", "--print-value-only", bounds)
        return json.loads(found)["expected"] if found else None

    def waits(reason: str) -> None:
        waiting = {
            "name": "trainer",
            "image": "t:1",
            "imageID": "",
            "ready": False,
            "restartCount": 0,
            "state": {"waiting": {"reason": reason}},
        }
        ns.set_pod("job-1", phase="Pending", containerStatuses=[waiting])

    wait_until(lambda: expected() == 1, "a pod without a machine is given up", SECONDS)
    waits("ContainerCreating")
    wait_until(lambda: expected() == 2, "a pod whose image is pulled is expected", SECONDS)
    waits("ErrImagePull")
    wait_until(lambda: expected() == 1, "a pod without image is given up", SECONDS)
