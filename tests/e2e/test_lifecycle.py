"""Life cycle of a job: reused names, suspension, pod clean-up, deadlines, deletion."""

from __future__ import annotations

import time

import pytest

from tests.e2e.conftest import MakeCorner
from tests.e2e.console import Json, until
from tests.e2e.corner import Corner
from tests.e2e.installation import Installation
from tests.e2e.manifests import IMAGE, counting, job

pytestmark = pytest.mark.timeout(240, func_only=True)

COMPANION = {"name": "companion", "image": IMAGE, "command": ["sleep", "10000"]}
"""Second container that never ends, so that a finished pod keeps running."""
GONE: list[str] = []
"""Uids of the jobs that these tests have deleted."""


@pytest.fixture(scope="module")
def lives(corner: Corner) -> Corner:
    """Return the namespace with all unattended jobs applied at once, for tests of their ends."""
    short, grace = counting(3), {"terminationGracePeriodSeconds": 2}

    def kept(name: str, policy: str) -> Json:
        run = {"cleanPodPolicy": policy}
        return job(name, short, nodes=1, others=(COMPANION,), pod=grace, runPolicy=run,
                   recovery={"stopGraceSeconds": 1})  # fmt: skip

    corner.apply(
        kept("keep-all", "None"),
        kept("keep-ended", "Running"),
        kept("keep-none", "All"),
        job("deadline", nodes=1, runPolicy={"activeDeadlineSeconds": 15}),
        job("short-lived", short, nodes=1, runPolicy={"ttlSecondsAfterFinished": 5}),
    )
    return corner


def test_same_name_in_two_namespaces_gives_two_jobs(
    make_corner: MakeCorner, installation: Installation
) -> None:
    one, two = make_corner("e2e-one"), make_corner("e2e-two")
    for corner in (one, two):
        corner.apply(job("same", nodes=2))
    uids = []
    for corner in (one, two):
        status = corner.running("same", 2)
        pods = corner.pods("same")
        assert {m["pod"] for m in status["members"]} == set(pods) == {"same-0", "same-1"}
        uids.append(corner.job("same")["metadata"]["uid"])
        assert installation.keys_of(uids[-1])
    before = two.running("same", 2)
    one.delete("same")
    one.without_pods("same")
    GONE.append(uids[0])
    assert installation.keys_of(uids[1])
    after = two.running("same", 2)
    assert after["rendezvous"] == before["rendezvous"]
    two.delete("same", "--wait=false")


def test_recreated_job_inherits_nothing_from_its_predecessor(corner: Corner) -> None:
    """The job is recreated at once with another size, while the old one's pods still end."""
    uids = set()
    for life, nodes in enumerate((2, 1, 2)):
        corner.apply(job("again", nodes=nodes, most=4, maxRestarts=life))
        uid = corner.job("again")["metadata"]["uid"]
        uids.add(uid)
        status = corner.running("again", nodes)
        rounds = [found["cause"] for found in status["rounds"]]
        assert rounds[0] == "start", "a life begins with its own first round"
        assert status["rendezvous"]["round"] == len(rounds)
        assert (status["restarts"], status.get("firstFailure")) == (0, None)
        owners = {
            reference["uid"]
            for pod in corner.active("again").values()
            for reference in pod["metadata"]["ownerReferences"]
        }
        assert owners == {uid}
        if life:
            corner.kill_worker(max(corner.active("again")))
            corner.running("again", nodes, after=status["rendezvous"]["round"])
            assert corner.status("again")["restarts"] == 1
        corner.delete("again")
    assert len(uids) == 3
    GONE.extend(uids)


def test_deleted_job_ends_within_its_grace_period(corner: Corner) -> None:
    stubborn = {
        "command": ["python3", "-c", "import signal, time\n"
                    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\n"
                    "while True: time.sleep(1)"],
    }  # fmt: skip
    corner.apply(
        job("ended", stubborn, nodes=2, pod={"terminationGracePeriodSeconds": 15},
            recovery={"stopGraceSeconds": 3})
    )  # fmt: skip
    corner.running("ended", 2)
    uid = corner.job("ended")["metadata"]["uid"]
    began = time.monotonic()
    corner.delete("ended")
    assert time.monotonic() - began < 10, "nothing holds the object up"
    corner.without_pods("ended", within=25)
    assert time.monotonic() - began < 25, "the pods' grace, and what garbage collection takes"
    own = "services,secrets,poddisruptionbudgets"
    corner.until(
        lambda: not corner.items(own, "-l", f"elasticjob.dev/job-uid={uid}"),
        f"{own} to be gone",
    )
    GONE.append(uid)


def test_job_is_suspended_changed_and_resumed(corner: Corner) -> None:
    corner.apply(job("paused", nodes=2))
    corner.running("paused", 2)
    corner.patch("paused", {"runPolicy": {"suspend": True}})
    status = corner.in_phase("paused", "Suspended")
    corner.without_pods("paused")
    assert corner.status("paused")["pods"] == 0
    assert corner.condition("paused", "Suspended")["status"] == "True"

    corner.apply(job("paused", nodes=2, nprocPerNode=2, runPolicy={"suspend": False}))
    status = corner.running("paused", 2)
    assert status["rendezvous"]["worldSize"] == 4
    assert (status["phase"], status["restarts"]) == ("Running", 0)
    assert corner.condition("paused", "Suspended")["status"] == "False"
    corner.finish("paused")
    corner.in_phase("paused", "Succeeded")


def test_clean_pod_policy_selects_remaining_pods(lives: Corner) -> None:
    for name in ("keep-all", "keep-ended", "keep-none"):
        lives.in_phase(name, "Succeeded")

    def phases(name: str) -> list[str]:
        return [pod["status"]["phase"] for pod in lives.pods(name).values()]

    # The companion keeps the pod running; only its deletion ends it.
    lives.until(lambda: phases("keep-ended") == [], "pods that ran to be gone")
    lives.until(lambda: phases("keep-none") == [], "all pods to be gone")
    assert phases("keep-all") == ["Running"]
    lives.delete("keep-all", "--wait=false")


def test_job_beyond_active_deadline_fails(lives: Corner) -> None:
    status = lives.in_phase("deadline", "Failed")
    failed = lives.condition("deadline", "Failed")
    assert failed["reason"] == "DeadlineExceeded"
    assert (status["restarts"], status["rendezvous"]["state"]) == (0, "closed")
    lives.until(lambda: lives.active("deadline") == {}, "its pods to end")


def test_finished_job_is_deleted_after_its_time_to_live(lives: Corner) -> None:
    lives.until(lambda: lives.job("short-lived") == {}, "the job to be gone", 90)
    lives.without_pods("short-lived")


def test_deleted_jobs_leave_nothing_in_etcd(installation: Installation) -> None:
    """Keys, users and roles of the jobs deleted by the tests above are removed."""
    assert GONE

    def left() -> list[str]:
        found = [key for uid in GONE for key in installation.keys_of(uid)]
        who = installation.etcdctl("user", "list") + installation.etcdctl("role", "list")
        return found + [uid for uid in GONE if uid in who]

    until(lambda: not left(), "etcd to forget the deleted jobs", 120)
