"""Real training on torch's own rendezvous backends: it survives faults and succeeds, and its status
is correct although the operator does not read the rendezvous from etcd.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import pytest

from tests.cluster.cluster import Cluster
from tests.e2e import old_etcd
from tests.e2e.console import Json
from tests.e2e.job_namespace import JobNamespace, seconds
from tests.e2e.manifests import digits_until, job
from tests.e2e.recorder import Recorder
from tests.e2e.report import Report

pytestmark = pytest.mark.timeout(600, func_only=True)

CHECKPOINT_STEPS = 5
MORE_STEPS = 60
"""Steps from the last fault to the end, at five a second."""
RECOVERY_SECONDS = 90.0
"""Recovery timeout: torch's backends detect a loss after keepAliveSeconds or a pod's end."""
STATUS_LAG_SECONDS = 2.0 + 1.0
"""Maximum lag of the status: agents are polled once a second; status times have whole seconds."""


@dataclass(frozen=True, slots=True)
class Training:
    """Job that is disturbed by faults."""

    ns: JobNamespace
    report: Report
    name: str

    @property
    def status(self) -> Json:
        return self.ns.status(self.name)

    def begun(self, rendezvous: Json) -> None:
        self.ns.apply(
            job(
                self.name,
                digits_until("--checkpoint-every", CHECKPOINT_STEPS),
                nodes=2,
                maxRestarts=5,
                rendezvous={"lastCallSeconds": 5, **rendezvous},
            )
        )
        self.ns.running(self.name, 2)
        self.ns.advances(self.name, 2 * CHECKPOINT_STEPS)

    def apply_fault(self, fault: str, act: Callable[[], object]) -> None:
        """Apply the fault; both nodes must train on in a later round."""
        before, reached = self.status["rendezvous"]["round"], self.ns.latest(self.name)
        act()
        found = self.ns.running(self.name, 2, after=before, within=RECOVERY_SECONDS)
        self.ns.advances(self.name, reached, within=RECOVERY_SECONDS)
        self.report.add("backends", job=self.name, fault=fault, rounds=found["rounds"][-2:])

    def delete(self, pod: str) -> None:
        self.ns.kubectl("delete", "pod", pod, "--wait=false")

    def others(self) -> list[str]:
        """Return the pods except the first one."""
        return sorted(set(self.ns.active(self.name)) - {f"{self.name}-0"})

    def succeeds_after_a_killed_worker(self, recorder: Recorder) -> None:
        """Kill a worker; check that the next round continues at the last checkpoint and succeeds,
        and that the status never lagged.

        That round is the last one, regardless of the duration of the earlier ones.
        """
        last = self.ns.latest(self.name) + MORE_STEPS
        for pod in self.ns.active(self.name):
            self.ns.exec(pod, "trainer", f"printf {last} > /tmp/last-step")
        number = self.status["rendezvous"]["round"]
        self.ns.kill_worker(self.others()[0])
        self.ns.in_phase(self.name, "Succeeded", within=300)
        later = [found for found in self.status["rounds"] if found["round"] > number]
        assert later[0]["cause"] == "failure"
        self.report.add("backends", job=self.name, fault="worker killed", rounds=later)
        numbers = [step.number for step in self.ns.steps(self.name)]
        assert all(after > before - CHECKPOINT_STEPS for before, after in pairwise(numbers)), (
            numbers
        )
        status = self.status
        assert status["rendezvous"]["state"] == "closed"
        assert status["restarts"] == 1, "of all that was done to it one thing was a failure"
        assert status["lastFailure"]["signal"] == 9
        told = "".join(self.ns.log(pod) for pod in self.ns.pods(self.name))
        assert f"step {last} " in told
        lags = self._lags(recorder)
        assert len(lags) >= 3, "as many rounds as it was hurt"
        self.report.add("backendLags", job=self.name, seconds=[round(lag, 2) for lag in lags])
        assert statistics.median(lags) < STATUS_LAG_SECONDS

    def _lags(self, recorder: Recorder) -> list[float]:
        """Return, for each final round, the delay from its agents' report to its first status."""
        uid = self.ns.job(self.name)["metadata"]["uid"]
        found: dict[int, float] = {}
        for seen in recorder.statuses:
            if seen.job == uid and seen.what["state"] == "final" and seen.what.get("since"):
                lag = seen.at - seconds(seen.what["since"])
                found.setdefault(seen.what["round"], lag)
        return list(found.values())


def test_c10d_job_survives_faults_without_etcd(
    ns: JobNamespace, recorder: Recorder, report: Report
) -> None:
    training = Training(ns, report, "c10d")
    training.begun({"backend": "C10d"})
    assert training.status["rendezvous"]["worldSize"] == 2
    training.apply_fault("pod deleted", lambda: training.delete(training.others()[0]))
    keeper = ns.pods("c10d")["c10d-0"]["metadata"]["uid"]
    training.apply_fault("store's pod deleted", lambda: training.delete("c10d-0"))
    assert ns.pods("c10d")["c10d-0"]["metadata"]["uid"] != keeper
    training.succeeds_after_a_killed_worker(recorder)


def test_etcd_v2_job_uses_the_users_etcd(
    ns: JobNamespace, cluster: Cluster, recorder: Recorder, report: Report
) -> None:
    ns.apply(job("nowhere", rendezvous={"backend": "EtcdV2"}))
    refused = ns.told("nowhere", "PodsReady", "False")
    assert refused["reason"] == "BackendUnavailable"
    ns.delete("nowhere", "--wait=false")
    training = Training(ns, report, "v2")
    training.begun({"backend": "EtcdV2", "endpoints": [old_etcd.start(cluster, ns)]})
    training.apply_fault("pod deleted", lambda: training.delete(training.others()[0]))
    training.apply_fault("first pod deleted", lambda: training.delete("v2-0"))
    training.succeeds_after_a_killed_worker(recorder)


def test_suspended_job_resumes_as_new_incarnation(ns: JobNamespace) -> None:
    ns.apply(job("paused", nodes=2, rendezvous={"backend": "C10d", "lastCallSeconds": 5}))
    ns.running("paused", 2)
    ns.patch("paused", {"runPolicy": {"suspend": True}})
    ns.in_phase("paused", "Suspended")
    ns.without_pods("paused")
    ns.patch("paused", {"runPolicy": {"suspend": False}})
    ns.running("paused", 2)
    ns.finish("paused")
    ns.in_phase("paused", "Succeeded")
