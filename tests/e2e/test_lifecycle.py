"""Life cycle of a job: reused names, suspension, pod clean-up, deadlines, deletion."""

from __future__ import annotations

import pytest

from elasticjob_operator.reconcile.resync import RESYNC_SECONDS
from tests.e2e.conftest import MakeNamespace
from tests.e2e.console import CALL_POLL_SECONDS, Json, until
from tests.e2e.installation import Installation
from tests.e2e.job_namespace import START_SECONDS, JobNamespace
from tests.e2e.manifests import IMAGE, counting, job

pytestmark = pytest.mark.timeout(600, func_only=True)

COMPANION = {"name": "companion", "image": IMAGE, "command": ["sleep", "10000"]}
"""Second container that never ends, so that a finished pod keeps running."""
FORGET_SECONDS = 3 * RESYNC_SECONDS
"""Timeout for the deletion of a deleted job's data, which the second resync after it does."""
GONE: list[str] = []
"""Uids of the jobs that these tests have deleted."""


@pytest.fixture(scope="module")
def ending_jobs(ns: JobNamespace) -> JobNamespace:
    """Return the namespace with all unattended jobs applied at once, for tests of their ends."""
    short, grace = counting(3), {"terminationGracePeriodSeconds": 2}

    def kept(name: str, policy: str) -> Json:
        run = {"cleanPodPolicy": policy}
        return job(name, short, nodes=1, others=(COMPANION,), pod=grace, runPolicy=run,
                   recovery={"stopGraceSeconds": 1})  # fmt: skip

    ns.apply(
        kept("keep-all", "None"),
        kept("keep-ended", "Running"),
        kept("keep-none", "All"),
        job("deadline", nodes=1, runPolicy={"activeDeadlineSeconds": 15}),
        job("short-lived", short, nodes=1, runPolicy={"ttlSecondsAfterFinished": 5}),
    )
    return ns


def test_same_name_in_two_namespaces_gives_two_jobs(
    make_namespace: MakeNamespace, installation: Installation
) -> None:
    one, two = make_namespace("e2e-one"), make_namespace("e2e-two")
    for ns in (one, two):
        ns.apply(job("same", nodes=2))
    uids = []
    for ns in (one, two):
        status = ns.running("same", 2)
        pods = ns.pods("same")
        assert {m["pod"] for m in status["members"]} == set(pods) == {"same-0", "same-1"}
        uids.append(ns.job("same")["metadata"]["uid"])
        assert installation.keys_of(uids[-1])
    before = two.running("same", 2)
    one.delete("same")
    one.without_pods("same")
    GONE.append(uids[0])
    assert installation.keys_of(uids[1])
    after = two.running("same", 2)
    assert after["rendezvous"] == before["rendezvous"]
    two.delete("same", "--wait=false")


def test_recreated_job_inherits_nothing_from_its_predecessor(ns: JobNamespace) -> None:
    """The job is recreated at once with another size, while the old one's pods still end."""
    uids = set()
    for life, nodes in enumerate((2, 1, 2)):
        ns.apply(job("again", nodes=nodes, most=4, maxRestarts=life))
        uid = ns.job("again")["metadata"]["uid"]
        uids.add(uid)
        status = ns.running("again", nodes)
        rounds = [found["cause"] for found in status["rounds"]]
        assert rounds[0] == "start", "a life begins with its own first round"
        assert status["rendezvous"]["round"] == len(rounds)
        assert (status["restarts"], status.get("firstFailure")) == (0, None)
        owners = {
            reference["uid"]
            for pod in ns.active("again").values()
            for reference in pod["metadata"]["ownerReferences"]
        }
        assert owners == {uid}
        if life:
            ns.kill_worker(max(ns.active("again")))
            ns.running("again", nodes, after=status["rendezvous"]["round"])
            assert ns.status("again")["restarts"] == 1
        ns.delete("again")
    assert len(uids) == 3
    GONE.extend(uids)


def test_deleted_job_ends_within_its_grace_period(ns: JobNamespace) -> None:
    stubborn = {
        "command": ["python3", "-c", "import signal, time\n"
                    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n"
                    "while True: time.sleep(1)"],
    }  # fmt: skip
    ns.apply(
        job("ended", stubborn, nodes=2, pod={"terminationGracePeriodSeconds": 240},
            recovery={"stopGraceSeconds": 3})
    )  # fmt: skip
    ns.running("ended", 2)
    uid = ns.job("ended")["metadata"]["uid"]
    assert "finalizers" not in ns.job("ended")["metadata"], "nothing holds the object up"
    ns.delete("ended")
    ns.without_pods("ended", within=START_SECONDS)  # the kubelet waits for longer
    label, own = f"elasticjob.dev/job-uid={uid}", ("services", "secrets", "poddisruptionbudgets")
    ns.until(
        lambda: not any(ns.items(resource, label) for resource in own),
        f"{', '.join(own)} to be gone",
    )
    GONE.append(uid)


def test_job_is_suspended_changed_and_resumed(ns: JobNamespace) -> None:
    ns.apply(job("paused", nodes=2))
    ns.running("paused", 2)
    ns.patch("paused", {"runPolicy": {"suspend": True}})
    status = ns.in_phase("paused", "Suspended")
    ns.without_pods("paused")
    assert ns.status("paused")["pods"]["active"] == 0
    assert ns.condition("paused", "Suspended")["status"] == "True"

    ns.apply(job("paused", nodes=2, nprocPerNode=2, runPolicy={"suspend": False}))
    status = ns.running("paused", 2)
    assert status["rendezvous"]["worldSize"] == 4
    assert (status["phase"], status["restarts"]) == ("Running", 0)
    assert ns.condition("paused", "Suspended")["status"] == "False"
    ns.finish("paused")
    ns.in_phase("paused", "Succeeded")


def test_clean_pod_policy_selects_remaining_pods(ending_jobs: JobNamespace) -> None:
    for name in ("keep-all", "keep-ended", "keep-none"):
        ending_jobs.in_phase(name, "Succeeded")

    def phases(name: str) -> list[str]:
        return [pod["status"]["phase"] for pod in ending_jobs.pods(name).values()]

    # The companion keeps the pod running; only its deletion ends it.
    ending_jobs.until(lambda: phases("keep-ended") == [], "pods that ran to be gone")
    ending_jobs.until(lambda: phases("keep-none") == [], "all pods to be gone")
    assert phases("keep-all") == ["Running"]
    ending_jobs.delete("keep-all", "--wait=false")


def test_job_beyond_active_deadline_fails(ending_jobs: JobNamespace) -> None:
    status = ending_jobs.in_phase("deadline", "Failed")
    failed = ending_jobs.condition("deadline", "Failed")
    assert failed["reason"] == "DeadlineExceeded"
    assert (status["restarts"], status["rendezvous"]["state"]) == (0, "closed")
    ending_jobs.until(lambda: ending_jobs.active("deadline") == {}, "its pods to end")


def test_finished_job_is_deleted_after_its_time_to_live(ending_jobs: JobNamespace) -> None:
    ending_jobs.until(lambda: ending_jobs.job("short-lived") == {}, "the job to be gone", 90)
    ending_jobs.without_pods("short-lived")


def test_deleted_jobs_leave_nothing_in_etcd(installation: Installation) -> None:
    """Keys, users and roles of the jobs deleted by the tests above are removed."""
    assert GONE

    def left() -> list[str]:
        listings = [("get", "--prefix", "/elasticjob/", "--keys-only"), ("user", "list")]
        known = [installation.etcdctl(*words) for words in (*listings, ("role", "list"))]
        return [uid for uid in GONE if any(uid in printed for printed in known)]

    until(lambda: not left(), "etcd to forget the deleted jobs", FORGET_SECONDS, CALL_POLL_SECONDS)
