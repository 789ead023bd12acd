"""Reconcile loop of a local job: observe, plan, apply and write the status until the job is over.

Plan and status are computed by the operator's code. Events only wake the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import assert_never

from elasticjob_cli.errors import CommandError
from elasticjob_cli.local.agent_poller import AgentPoller
from elasticjob_cli.local.kubelet import Kubelet, LocalPod
from elasticjob_cli.local.logs import TRAINER, last_line
from elasticjob_cli.local.processes import Processes, SupervisorGone
from elasticjob_cli.local.round_log import RoundLog
from elasticjob_cli.local.stored_job import StoredJob
from elasticjob_operator.domain.observed.etcd_records import (
    Records,
    outcome_record,
    rendezvous_view,
)
from elasticjob_operator.domain.observed.from_agents import agent_view
from elasticjob_operator.domain.observed.state import UNREADABLE, Observed, SeenTrouble, StopReason
from elasticjob_operator.domain.plan.actions import (
    Action,
    CloseRendezvous,
    CreatePod,
    DeleteJob,
    DeletePod,
    RemoveMembers,
    WriteNodes,
    WriteParams,
)
from elasticjob_operator.domain.plan.backends import is_steered
from elasticjob_operator.domain.plan.lifecycle import FINISHED, grace_seconds, shutdown_time
from elasticjob_operator.domain.plan.planner import Plan, plan
from elasticjob_operator.domain.plan.saving import save_report, save_seconds
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model import Phase
from elasticjob_operator.rendezvous.informer_cache import Contended, InformerCache, RendezvousWriter
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.errors import EtcdError
from elasticjob_rendezvous.protocol.records.members import OutcomeKind
from elasticjob_rendezvous.protocol.records.params import RendezvousParams


class Applier:
    """Applier of plans that tracks the incarnation and bounds written last.

    `etcd` is None unless the rendezvous uses etcd's v3 API: then no plan writes to it.
    """

    def __init__(
        self,
        etcd: tuple[Client, InformerCache] | None,
        kubelet: Kubelet,
        prefix_of: Callable[[int], str],
        stored: StoredJob,
        note: Callable[[str], None],
    ) -> None:
        self._writer = None if etcd is None else RendezvousWriter(*etcd, prefix_of)
        self._kubelet = kubelet
        self._prefix_of = prefix_of
        self._stored = stored
        self._note = note
        self._complaint = ""
        self.incarnation = 1
        self.bounds: RendezvousParams | None = None

    @property
    def prefix(self) -> str:
        """Key prefix of the newest incarnation."""
        return self._prefix_of(self.incarnation)

    @property
    def _rendezvous(self) -> RendezvousWriter:
        assert self._writer is not None, "no plan writes to a rendezvous outside etcd v3"
        return self._writer

    async def apply(self, planned: Plan) -> None:
        """Apply the plan; the next plan repeats writes that etcd refused."""
        try:
            for action in planned.actions:
                await self._do(action)
            self._complaint = ""
        except (EtcdError, Contended) as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                self._note(f"cannot write to etcd, retrying: {error}")

    async def _do(self, action: Action) -> None:
        match action:
            case WriteNodes(nodes):
                self._stored.change_spec(nodes=nodes)
            case WriteParams(incarnation, bounds, revision):
                await self._rendezvous.write_params(incarnation, bounds, revision)
                if bounds.closing is not None:
                    within = save_seconds(bounds)
                    self._note(f"the workers are asked to save a checkpoint, within {within:g} s")
                self.incarnation, self.bounds = incarnation, bounds
            case CloseRendezvous(incarnation):
                now_ms = time.time_ns() // 1_000_000
                await self._rendezvous.close(incarnation, action.outcome, now_ms)
            case RemoveMembers(incarnation, members):
                await self._rendezvous.remove_members(incarnation, members)
            case CreatePod(index, name, incarnation):
                await self._kubelet.create(index, name, incarnation)
            case DeletePod(name, uid, reason):
                self._note(f"deleting pod {name}: {reason}")
                self._kubelet.delete(uid, grace_seconds(self._stored.job))
            case DeleteJob():
                pass  # a local job's last status stays readable until its user deletes it
            case _:
                assert_never(action)


TICK_SECONDS = 0.5
"""Refresh interval of progress and elapsed time without other events."""
COALESCE_SECONDS = 0.02
"""Delay that merges simultaneous events, such as the ends of a launcher and its agent."""
END_SECONDS = 5.0
"""Time for a finished job's pods to end, in addition to the job's grace period."""
MAX_FAILED_STARTS = 5
"""Maximum number of consecutive pods that fail before their first round."""


def _killed(observed: Observed) -> Observed:
    """Return the observation of a job whose processes are about to be killed."""
    view = observed.rendezvous
    if view.outcome is not None:
        return observed
    outcome = outcome_record(OutcomeKind.STOPPED, StopReason.SUSPENDED)
    outcome = replace(outcome, save=save_report(view, observed.bounds))
    return replace(observed, rendezvous=replace(view, outcome=outcome))


class ReconcileLoop:
    """Reconcile loop of one job. Setting `killed` ends it at once."""

    def __init__(
        self,
        stored: StoredJob,
        processes: Processes,
        cache: InformerCache | AgentPoller,
        kubelet: Kubelet,
        applier: Applier,
        round_log: RoundLog,
        show: Callable[[Observed], None],
        trouble: Callable[[], SeenTrouble | None] = lambda: None,
    ) -> None:
        self._stored = stored
        self._processes = processes
        self._cache = cache
        self._kubelet = kubelet
        self._applier = applier
        self._round_log = round_log
        self._show = show
        self._trouble = trouble
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
            planned = plan(self._stored.planned, self._observe(), datetime.now(UTC))
            await self._applier.apply(planned)
            over = self._update_status()
            if not over:
                await self._pause(planned.wake_at)

    async def follow_cache(self) -> None:
        """Wake the loop at each change of this job's rendezvous, until cancelled."""
        async for prefix in self._cache.changes():
            if prefix == self._applier.prefix:
                self.wake()

    def launcher_ended(self, pod: LocalPod) -> None:
        """Record a pod that failed before its first round; the next one would fail as well."""
        if not self._round_log.seated(pod.name):
            self._failures.append(pod)

    def _records(self) -> Records | None:
        return self._cache.records(self._applier.prefix)

    def _observe(self) -> Observed:
        found = self._records()
        members = [member.id for member in found.members] if found else []
        if not is_steered(self._stored.job):
            pods = self._kubelet.observed(members)
            if isinstance(self._cache, AgentPoller):
                pods = self._cache.with_reports(pods)
            view = agent_view(self._stored.job, pods, found, datetime.now(UTC))
            return Observed(
                pods=pods,
                rendezvous=view,
                incarnation=self._applier.incarnation,
                store=self._trouble(),
            )
        return Observed(
            pods=self._kubelet.observed(members),
            # All pods are on this machine, so it cannot be avoided.
            rendezvous=(
                UNREADABLE if found is None else replace(rendezvous_view(found), offences=())
            ),
            bounds=found.bounds if found else self._applier.bounds,
            bounds_revision=found.bounds_revision if found else 0,
            incarnation=self._applier.incarnation,
            store=self._trouble(),
        )

    def _update_status(self) -> bool:
        """Observe, then write and show the status; return True if the run is over."""
        observed, found = self._observe(), self._records()
        if self.killed.is_set():
            observed = _killed(observed)
        if found is not None and self._round_log.take(found):
            self._failures.clear()
            self._stored.save_rounds(self._round_log.rounds())
        now = datetime.now(UTC)
        status = next_status(self._stored.planned, observed, observed.rendezvous, now)
        self._stored.set_status(status)
        self._show(observed)
        self._check_failures(status.phase)
        return self._over()

    def _check_failures(self, phase: Phase | None) -> None:
        pods = self._kubelet.pods.values()
        if pods and all(pod.refused for pod in pods):
            raise CommandError(f"no pod could be started: {next(iter(pods)).refused}")
        if len(self._failures) >= MAX_FAILED_STARTS and phase not in FINISHED:
            last = self._failures[-1]
            # The newest pods' output may not be written yet.
            said = last_line(*(pod.files.logs / TRAINER for pod in reversed(self._failures)))
            raise CommandError(
                f"{len(self._failures)} pods ended before they were in a round, the last one with "
                f"{last.launcher_exit}; its logs are in {last.files.logs}{said}"
            )

    async def _pause(self, wake_at: datetime | None) -> None:
        """Wait for an event or until `wake_at`; refresh the view meanwhile."""
        while not self._over():
            seconds = TICK_SECONDS
            if wake_at is not None:
                left = (wake_at - datetime.now(UTC)).total_seconds()
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
            self._show(self._observe())

    def _over(self) -> bool:
        job, pods = self._stored.job, self._kubelet.pods
        if self.killed.is_set():
            return True
        if self._stored.deleted or job.status.phase is Phase.SUSPENDED:
            return not pods
        if job.status.phase not in FINISHED:
            return False
        now = datetime.now(UTC)
        ended = job.status.completion_time or now
        due = ended + shutdown_time(job) + timedelta(seconds=END_SECONDS)
        return now > due or all(pod.launcher_exit for pod in pods.values())
