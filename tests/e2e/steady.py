"""Job that counts its steps, and the checks that a fault did not disturb its workers."""

from __future__ import annotations

from collections.abc import Callable

from tests.e2e.console import Json
from tests.e2e.job_namespace import JobNamespace

NAME = "steady"


def pids(ns: JobNamespace) -> dict[str, str]:
    """Return the pid of each pod's worker, by pod, from its last steps."""
    return {step.pod: step.pid for step in ns.steps(NAME, tail=5)}


def survive(ns: JobNamespace, act: Callable[[], object], back: Callable[[], object]) -> None:
    """Apply the fault and wait for recovery: the same workers must train on."""
    before, status = pids(ns), ns.running(NAME, 2)
    assert len(before) == 2
    act()
    ns.advances(NAME, ns.latest(NAME) + 20)
    back()
    reached = ns.latest(NAME)
    ns.advances(NAME, reached + 20)
    assert pids(ns) == before
    told = ns.steps(NAME)
    for worker in before.items():
        counted = [step.number for step in told if (step.pod, step.pid) == worker]
        assert counted == list(range(counted[0], counted[0] + len(counted))), "a step is missing"
    after = ns.running(NAME, 2)
    assert after["rendezvous"]["round"] == status["rendezvous"]["round"]
    assert after["restarts"] == status["restarts"]


def recovers(ns: JobNamespace) -> None:
    """Check that failure handling works again: a killed worker is detected and restarted."""
    before = ns.running(NAME, 2)
    ns.kill_worker(f"{NAME}-0")
    after = ns.running(NAME, 2, after=before["rendezvous"]["round"])
    assert after["rounds"][-1]["cause"] == "failure"
    # The restart budget must not be spent by the failures of these tests.
    ns.patch(NAME, {"maxRestarts": after["restarts"] + 3})


def restarts_of(pod: Json, container: str) -> int:
    status = pod.get("status") or {}
    kinds = ("initContainerStatuses", "containerStatuses")
    found = [each for kind in kinds for each in status.get(kind) or ()]
    return sum(int(each["restartCount"]) for each in found if each["name"] == container)
