"""First steps of a user: apply the example, watch it, wait for its end."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import pytest

from tests.e2e.job_namespace import JobNamespace
from tests.e2e.report import Report
from tests.paths import ROOT

pytestmark = pytest.mark.timeout(600, func_only=True)

MANIFEST = ROOT / "examples" / "digits" / "elasticjob.yaml"


class Watch:
    """Lines of `kubectl get ej … -w`, as a user sees them."""

    def __init__(self, ns: JobNamespace, name: str) -> None:
        self._process = ns.console.start("-n", ns.namespace, "get", "ej", name, "-w")
        self.lines: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        self.lines.extend(line.rstrip("\n") for line in self._process.stdout)

    def end(self) -> None:
        self._process.kill()
        self._process.wait(timeout=60)
        self._thread.join(timeout=60)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def words(self) -> list[tuple[str, str]]:
        """Return phase and rendezvous of each line, without repetitions."""
        found: list[tuple[str, str]] = []
        for line in self.lines[1:]:
            columns = line.split()
            if len(columns) == 8 and (not found or found[-1] != (columns[1], columns[2])):
                found.append((columns[1], columns[2]))
        return found


@pytest.fixture(scope="session")
def watch(example_namespace: JobNamespace) -> Iterator[Watch]:
    """Yield a watch on the example, just applied."""
    example_namespace.kubectl("apply", "-f", MANIFEST)
    found = Watch(example_namespace, "digits")
    yield found
    found.end()


def test_applied_example_reaches_running(example_namespace: JobNamespace, watch: Watch) -> None:
    wait = ("wait", "--for=condition=Running", "ej/digits", "--timeout=150s")
    example_namespace.kubectl(*wait, seconds=160)


def test_applied_example_trains_to_the_end(
    example_namespace: JobNamespace, watch: Watch, report: Report
) -> None:
    ns = example_namespace
    wait = ("wait", "--for=condition=Finished", "ej/digits", "--timeout=240s")
    ns.kubectl(*wait, seconds=250)
    ns.until(lambda: ("Succeeded", "closed") in watch.words(), "the last line")
    header = watch.lines[0].split()
    assert header == ["NAME", "PHASE", "RENDEZVOUS", "ROUND", "NODES", "WANTED", "RESTARTS", "AGE"]
    words = watch.words()
    stages = [("Pending", "joinable"), ("Running", "final"), ("Succeeded", "closed")]
    assert [word for word in words if word in stages] == stages, words
    assert {phase for phase, _ in words} == {"Pending", "Running", "Succeeded"}, words

    status = ns.status("digits")
    assert status["phase"] == "Succeeded"
    assert status["restarts"] == 0
    ns.kubectl("wait", "--for=condition=Succeeded", "ej/digits", "--timeout=5s")
    told = re.findall(r"step (\d+) loss \S+ accuracy (\S+) world (\d)", ns.log("digits-0"))
    step, accuracy, world = told[-1]
    assert (step, world) == ("300", "2")
    assert float(accuracy) >= 0.95
    report.add("digits", accuracy=float(accuracy), rounds=status["rounds"])

    wide = ns.kubectl("get", "ej", "digits", "-o", "wide").splitlines()
    assert wide[0].split()[8:13] == ["MIN", "MAX", "MASTER", "CAUSE", "FAILURE"]
    assert wide[1].split()[8:12] == ["1", "4", "digits-0", "start"]
    ns.until(lambda: _phases(ns) == ["Succeeded"] * 2, "the pods to have succeeded")
    told_of = {"PodsCreated", "RoundFinal", "Running", "Succeeded"}
    ns.until(lambda: told_of <= set(ns.reasons("digits")), "the events")


def _phases(ns: JobNamespace) -> list[str]:
    return [pod["status"]["phase"] for pod in ns.pods("digits").values()]
