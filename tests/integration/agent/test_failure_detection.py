"""Detection time of each kind of fault, on real processes: from the fault to the next round.

`-s` prints the seconds, which docs/protocol.md shows. The limits suit a machine under load: they
distinguish milliseconds from a lease, and a lease from more than that.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from elasticjob_rendezvous.protocol.records.keys import Keys
from elasticjob_rendezvous.protocol.records.members import CauseKind, RoundState
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.integration.agent_rig import WORKER, Gang, Pod, gang, until
from tests.integration.launcher_rig import alive, launcher_file, process_tag

__all__ = ["gang", "launcher_file", "process_tag"]

LEASE_SECONDS = 3.0
LONG_LEASE_SECONDS = 60.0
AT_ONCE_SECONDS = 40.0  # less than a long lease: only the event itself can have revealed it
LATEST_SECONDS = LEASE_SECONDS + 22.0  # less than the 30 s that workers without an agent may live
GRACE_SECONDS = 300.0  # longer than any wait
KILLED_SECONDS = 2.0
"""Time in which workers without a grace period would be killed."""
STEPS = 60  # of 0.02 s
OPENS = re.compile(r"round (\d+) opens: (\w+)")
ABORTED = "RuntimeError('[gloo] Connection closed by peer [10.0.0.7]:41234')"


class Job:
    """Three pods of which each runs one worker of round 1."""

    def __init__(
        self,
        gang: Gang,
        launcher: Path,
        lease_seconds: float = LEASE_SECONDS,
        grace_seconds: float = 3.0,
    ) -> None:
        self.gang = gang
        bounds = RendezvousParams(
            1,
            4,
            expected=3,
            keep_alive_seconds=lease_seconds,
            stop_grace_seconds=grace_seconds,
        )
        env = {"ELASTICJOB_STOP_GRACE_SECONDS": str(grace_seconds)}
        self.pods = gang.pods(3, launcher, lease_seconds, env, bounds=bounds)
        self.keys = Keys(gang.prefix)
        self.workers = gang.started(1, 3)
        until(lambda: self.said("all workers started"), "the round's start")
        # The members hold their links to the coordinator some 0.3 s after the start, before these
        # steps.
        until(lambda: all(gang.steps(worker) >= STEPS for worker in self.workers), "their steps")
        self._stopped: list[int] = []

    def pod(self, coordinates: bool) -> tuple[Pod, dict[str, Any]]:
        """Return the coordinator's pod, or the last of the others, with its worker."""
        leader = self.gang.round().coordinator
        found = list(zip(self.pods, self.workers, strict=True))
        return [pair for pair in found if (f"uid-{pair[0].name}" == leader) is coordinates][-1]

    def said(self, text: str) -> bool:
        return any(text in agent.output() for agent in self.gang.agents)

    def opened(self) -> tuple[str, float]:
        """Return the cause and time of round 2."""

        def found() -> str:
            for agent in self.gang.agents:
                for number, kind in OPENS.findall(agent.output()):
                    if number == "2":
                        return str(kind)
            return ""

        return str(until(found, f"round 2\n{self.gang.outputs()}")), time.monotonic()

    def pids(self, pod: Pod, worker: dict[str, Any]) -> list[int]:
        """Return every process of the pod."""
        return [pod.agent.process.pid, pod.launcher.process.pid, int(worker["pid"])]

    def stop(self, *pids: int) -> None:
        """Stop these processes."""
        self._stopped += pids
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

    def close(self) -> None:
        for pid in (*self._stopped, *(int(worker["pid"]) for worker in self.workers)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def running(gang: Gang, launcher: Path, **options: Any) -> Iterator[Job]:
    with ExitStack() as stack:
        job = Job(gang, launcher, **options)
        stack.callback(job.close)
        yield job


def kill_worker(job: Job) -> None:
    os.kill(job.pod(coordinates=False)[1]["pid"], signal.SIGKILL)


def kill_node(job: Job) -> None:
    for pid in job.pids(*job.pod(coordinates=False)):
        os.kill(pid, signal.SIGKILL)


def kill_coordinators_node(job: Job) -> None:
    for pid in job.pids(*job.pod(coordinates=True)):
        os.kill(pid, signal.SIGKILL)


def kill_launcher(job: Job) -> None:
    job.pod(coordinates=False)[0].launcher.signal(signal.SIGKILL)


def drain(job: Job) -> None:
    job.pod(coordinates=False)[0].agent.signal(signal.SIGTERM)


def silence(job: Job) -> None:
    job.stop(*job.pids(*job.pod(coordinates=False)))


def silence_the_coordinator(job: Job) -> None:
    job.stop(*job.pids(*job.pod(coordinates=True)))


@pytest.mark.parametrize(
    ("fault", "cause", "charged", "lease", "latest"),
    [
        (kill_worker, CauseKind.FAILURE, (1,), LONG_LEASE_SECONDS, AT_ONCE_SECONDS),
        (kill_node, CauseKind.LOSS, (), LONG_LEASE_SECONDS, AT_ONCE_SECONDS),
        (kill_coordinators_node, CauseKind.LOSS, (), LONG_LEASE_SECONDS, AT_ONCE_SECONDS),
        (kill_launcher, CauseKind.FAILURE, (1,), LONG_LEASE_SECONDS, AT_ONCE_SECONDS),
        (drain, CauseKind.LEAVE, (), LONG_LEASE_SECONDS, AT_ONCE_SECONDS),
        (silence, CauseKind.LOSS, (), LEASE_SECONDS, LATEST_SECONDS),
        (silence_the_coordinator, CauseKind.LOSS, (), LEASE_SECONDS, LATEST_SECONDS),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_fault_is_detected_in_time_and_attributed_to_its_cause(
    gang: Gang,
    launcher_file: Path,
    fault: Callable[[Job], None],
    cause: CauseKind,
    charged: tuple[int, ...],
    lease: float,
    latest: float,
) -> None:
    with running(gang, launcher_file, lease_seconds=lease) as job:
        began = time.monotonic()
        fault(job)
        kind, at = job.opened()
        print(f"\n{fault.__name__}: {kind} after {at - began:.3f} s")
        assert kind == cause, gang.outputs()
        assert at - began < latest, gang.outputs()
        until(lambda: gang.round().state is RoundState.FINAL, "the next round")
        assert gang.round().charged == charged


def test_killed_agent_causes_no_round(gang: Gang, launcher_file: Path) -> None:
    """The workers train on, for longer than the agent's lease would have lasted."""
    with running(gang, launcher_file) as job:
        pod, worker = job.pod(coordinates=False)
        pod.agent.signal(signal.SIGKILL)
        until(
            lambda: job.said(f"{pod.name} lost its agent; its workers keep running"), "the orphan"
        )
        enough = time.monotonic() + 2 * LEASE_SECONDS
        while time.monotonic() < enough:
            gang.stepping(worker)
        assert gang.round().number == 1, gang.outputs()
        pod.agent.wait()
        pod.start_agent()
        gang.finish()
        assert pod.agent.wait() == 0, gang.outputs()
        assert gang.round().charged == ()


def test_workers_of_hung_agent_end_before_next_round_without_failure(
    gang: Gang, launcher_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease may end first, or be kept for the maximum life of workers without an agent."""
    monkeypatch.setenv("ELASTICJOB_ORPHAN_SECONDS", "4")
    with running(gang, launcher_file) as job:
        pod, worker = job.pod(coordinates=False)
        began = time.monotonic()
        job.stop(pod.agent.process.pid)
        kind, at = job.opened()
        print(f"\na hung agent: {kind} after {at - began:.3f} s")
        assert kind == CauseKind.LOSS
        assert at - began < LATEST_SECONDS + 4.0
        gang.started(2, 2)
        assert not alive(worker["pid"]), "two rounds ran side by side"
        pod.agent.signal(signal.SIGCONT)
        gang.started(3, 3)
        assert gang.round().charged == ()
        failures = gang.etcd.ctl("get", "--prefix", "--keys-only", job.keys.failures(1))
        assert not failures.strip(), "what its launcher ended was reported as a failure"


def test_operator_drain_request_ends_wait_for_silent_node(gang: Gang, launcher_file: Path) -> None:
    """The node's lease would have lasted for a minute."""
    with running(gang, launcher_file, lease_seconds=60.0) as job:
        pod, worker = job.pod(coordinates=False)
        job.stop(*job.pids(pod, worker))
        until(
            lambda: job.said(f"{pod.name} does not answer probes: waiting for its lease to expire"),
            "its silence",
        )
        began = time.monotonic()
        gang.etcd.ctl("del", "--prefix", job.keys.sessions(f"uid-{pod.name}"))
        kind, at = job.opened()
        print(f"\nthe operator's word: {kind} after {at - began:.3f} s")
        assert kind == CauseKind.LOSS
        assert at - began < 40.0, "two thirds of the lease"


def test_peers_that_abort_before_node_loss_are_not_charged(gang: Gang, launcher_file: Path) -> None:
    gang.script.write_text(WORKER.replace('ValueError("told to fail by a file")', ABORTED))
    with running(gang, launcher_file) as job:
        pod, silent = job.pod(coordinates=False)
        job.stop(*job.pids(pod, silent))
        began = time.monotonic()
        for worker in job.workers:
            if worker is not silent:
                gang.fail(int(worker["RANK"]))
        kind, at = job.opened()
        print(f"\npeers of a silent node abort: {kind} after {at - began:.3f} s")
        assert kind == CauseKind.FAILURE, "the round does not wait for the verdict"
        until(lambda: not gang.round().pending, "the verdict")
        after = gang.round()
        assert (after.charged, after.counts.losses) == ((), 1), gang.outputs()


def test_survivors_that_ignore_sigterm_get_grace_for_leave_but_not_for_loss(
    gang: Gang, launcher_file: Path
) -> None:
    """The grace period is longer than any wait of this test, which kills the last workers."""
    deaf = (
        "import os, pathlib, signal, sys\n"
        "told = pathlib.Path(sys.argv[1], f'told-{os.getpid()}')\n"
        "signal.signal(signal.SIGTERM, lambda *_: told.touch())\n"
    )
    gang.script.write_text(deaf + WORKER)
    with running(
        gang, launcher_file, lease_seconds=LONG_LEASE_SECONDS, grace_seconds=GRACE_SECONDS
    ) as job:
        gone, worker = job.pod(coordinates=False)
        survivors = [other for other in job.workers if other is not worker]
        for pid in job.pids(gone, worker):
            os.kill(pid, signal.SIGKILL)
        until(lambda: not any(alive(other["pid"]) for other in survivors), "the survivors' end")
        second = gang.started(2, 2)
        leaver = next(pod for pod in job.pods if pod is not gone)
        leaver.agent.signal(signal.SIGTERM)
        for other in second:
            until((gang.folder / f"told-{other['pid']}").exists, f"SIGTERM of rank {other['RANK']}")
        enough = time.monotonic() + KILLED_SECONDS
        while time.monotonic() < enough:
            for other in second:
                gang.stepping(other)
        for other in second:
            os.kill(other["pid"], signal.SIGKILL)
        job.workers = gang.started(3, 1)
        assert gang.round().charged == ()
