"""Reconcile loop of a local job: pass after pass until the job is over.

The pass, the rendezvous source and the status are the operator's; events only wake the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from elasticjob_cli.errors import CommandError
from elasticjob_cli.local.cluster import KubeletPods, LocalCluster
from elasticjob_cli.local.kubelet import Kubelet, LocalPod
from elasticjob_cli.local.logs import TRAINER, last_line
from elasticjob_cli.local.processes import Processes, SupervisorGone
from elasticjob_cli.local.round_log import RoundLog
from elasticjob_cli.local.stored_job import StoredJob
from elasticjob_operator.domain.observed.etcd_records import Records, outcome_record
from elasticjob_operator.domain.observed.state import Observed, StopReason
from elasticjob_operator.domain.plan.actions import WriteParams
from elasticjob_operator.domain.plan.closing_checkpoint import (
    StoreAccess,
    save_report,
    save_seconds,
)
from elasticjob_operator.domain.plan.launch_failures import MOST_LAUNCH_FAILURES
from elasticjob_operator.domain.plan.lifecycle import FINISHED, shutdown_time
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model import Phase
from elasticjob_operator.reconcile.cluster import Applied
from elasticjob_operator.reconcile.job_memory import JobMemory
from elasticjob_operator.reconcile.plan_pass import Applier, Observer, run_pass
from elasticjob_operator.rendezvous.sources import RendezvousSource
from elasticjob_rendezvous.protocol.records.members import OutcomeKind

TICK_SECONDS = 0.5
"""Refresh interval of progress and elapsed time without other events."""
COALESCE_SECONDS = 0.02
"""Delay that merges simultaneous events, such as the ends of a launcher and its agent."""
END_SECONDS = 5.0
"""Time for a finished job's pods to end, in addition to the job's grace period."""


def _killed(observed: Observed) -> Observed:
    """Return the observation of a job whose processes are about to be killed."""
    view = observed.rendezvous
    if view.outcome is not None:
        return observed
    outcome = outcome_record(OutcomeKind.STOPPED, StopReason.SUSPENDED)
    outcome = replace(outcome, save=save_report(view, observed.bounds))
    return replace(observed, rendezvous=replace(view, outcome=outcome))


@dataclass(frozen=True, slots=True)
class LocalRendezvous:
    """Rendezvous of a local job.

    Args:
        source: reads and steers it.
        memory: of the job.
        records: returns the records that the source reads; None while they are not known.
        has_seen_end: returns True if the agent of this pod (uid) reported the end of the job.
    """

    source: RendezvousSource
    memory: JobMemory
    records: Callable[[], Records | None]
    has_seen_end: Callable[[str], bool] = lambda uid: False


class ReconcileLoop:
    """Reconcile loop of one job. Setting `killed` ends it at once."""

    def __init__(
        self,
        stored: StoredJob,
        processes: Processes,
        kubelet: Kubelet,
        rendezvous: LocalRendezvous,
        round_log: RoundLog,
        show: Callable[[Observed], None],
        note: Callable[[str], None],
    ) -> None:
        self._stored = stored
        self._processes = processes
        self._kubelet = kubelet
        self._rendezvous = rendezvous
        self._round_log = round_log
        self._show = show
        self._note = note
        self._observer = Observer(
            KubeletPods(kubelet, stored.job, self._members, rendezvous.has_seen_end)
        )
        self._applier = Applier(LocalCluster(kubelet, stored, note, self._allows_pods), _now)
        self._complaint = ""
        self._wake = asyncio.Event()
        self._failures: list[LocalPod] = []
        self.killed = asyncio.Event()

    def wake(self) -> None:
        """Trigger a reconcile soon."""
        self._wake.set()

    async def run(self) -> None:
        """Run until the job is over; raises `CommandError` if it cannot continue here."""
        over = False
        while not over:
            self._wake.clear()
            rendezvous = self._rendezvous
            done = await run_pass(
                self._stored.planned,
                rendezvous.memory,
                rendezvous.source,
                self._observer,
                self._applier,
                _now,
            )
            self._report(done.applied)
            if done.wrote_nodes:
                continue
            seen = self._observe_again(done.observation.observed, done.applied)
            over = self._update_status(seen, done.planned.access)
            if not over:
                await self._pause(done.planned.wake_at, seen)

    def _report(self, applied: Applied) -> None:
        """Note a request to save, and the first of equal errors in a row.

        The next plan repeats writes that etcd refused.
        """
        for action in applied.actions:
            if isinstance(action, WriteParams) and action.bounds.closing is not None:
                within = save_seconds(action.bounds)
                self._note(f"the workers are asked to save a checkpoint, within {within:g} s")
        complaint = "" if applied.error is None else str(applied.error)
        if complaint and complaint != self._complaint:
            self._note(f"cannot write to etcd, retrying: {complaint}")
        self._complaint = complaint

    def launcher_ended(self, pod: LocalPod) -> None:
        """Record a pod that failed before its first round; the next one would fail as well."""
        if not self._round_log.seated(pod.name):
            self._failures.append(pod)

    def _allows_pods(self) -> bool:
        """Return True until too many pods in a row have failed.

        The end of the pass then ends the run, or finds a round that has formed meanwhile; in that
        case the next pass creates the pods.
        """
        if len(self._failures) < MOST_LAUNCH_FAILURES:
            return True
        self.wake()
        return False

    def _members(self) -> list[str]:
        """Return the uids of the pods that hold a lease."""
        found = self._rendezvous.records()
        return [] if found is None else [member.id for member in found.members]

    def _observe_again(self, before: Observed, applied: Applied) -> Observed:
        rendezvous = self._rendezvous
        seen = self._observer.observe_again(
            self._stored.job, rendezvous.memory, rendezvous.source, before, applied
        )
        # All pods are on this machine, so it cannot be avoided.
        return replace(seen, rendezvous=replace(seen.rendezvous, offences=()))

    def _update_status(self, observed: Observed, access: StoreAccess) -> bool:
        """Write and show the status; return True if the run is over."""
        found = self._rendezvous.records()
        if self.killed.is_set():
            observed = _killed(observed)
        view = observed.rendezvous
        status = next_status(self._stored.planned, observed, view, _now(), access)
        rounds = view.rounds
        if found is not None and self._round_log.take(found, rounds, status.rounds):
            self._failures.clear()
            self._stored.save_rounds(self._round_log.rounds())
        self._stored.set_status(status)
        self._show(observed)
        self._check_failures(status.phase)
        return self._over()

    def _check_failures(self, phase: Phase | None) -> None:
        pods = self._kubelet.pods.values()
        if pods and all(pod.refused for pod in pods):
            raise CommandError(f"no pod could be started: {next(iter(pods)).refused}")
        if len(self._failures) >= MOST_LAUNCH_FAILURES and phase not in FINISHED:
            last = self._failures[-1]
            # The newest pods' output may not be written yet.
            output = last_line(*(pod.files.logs / TRAINER for pod in reversed(self._failures)))
            raise CommandError(
                f"{len(self._failures)} pods ended before they were in a round, the last one with "
                f"{last.launcher_exit}; its logs are in {last.files.logs}{output}"
            )

    async def _pause(self, wake_at: datetime | None, seen: Observed) -> None:
        """Wait for an event or until `wake_at`; refresh the view meanwhile."""
        while not self._over():
            seconds = TICK_SECONDS
            if wake_at is not None:
                left = (wake_at - _now()).total_seconds()
                if left <= 0:
                    return
                seconds = min(seconds, left)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
                await asyncio.sleep(COALESCE_SECONDS)
                return
            if self._stored.job.status.phase is Phase.SUSPENDING and not self._kubelet.pods:
                return  # the suspension is complete
            if self._processes.gone.is_set():
                raise SupervisorGone
            self._show(self._observe_again(seen, Applied()))

    def _over(self) -> bool:
        job, pods = self._stored.job, self._kubelet.pods
        if self.killed.is_set():
            return True
        if self._stored.deleted or job.status.phase is Phase.SUSPENDED:
            return not pods
        if job.status.phase not in FINISHED:
            return False
        now = _now()
        ended = job.status.completion_time or now
        due = ended + shutdown_time(job) + timedelta(seconds=END_SECONDS)
        return now > due or all(pod.launcher_exit for pod in pods.values())


def _now() -> datetime:
    return datetime.now(UTC)
