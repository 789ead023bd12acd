"""Reconcile loop of a local job: observe, plan, apply and write the status until the job is over.

Plan and status are computed by the operator's code. Events only wake the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from elasticjob_cli.errors import CommandError
from elasticjob_cli.local.apply import Applier
from elasticjob_cli.local.asked import AskedAgents
from elasticjob_cli.local.logs import TRAINER, last_words
from elasticjob_cli.local.pods import Kubelet, LocalPod
from elasticjob_cli.local.processes import Processes, WardenGone
from elasticjob_cli.local.records import RoundBook
from elasticjob_cli.local.stored import StoredJob
from elasticjob_operator.core.agent_view import agent_view
from elasticjob_operator.core.backends import is_steered
from elasticjob_operator.core.grace import winding_down
from elasticjob_operator.core.lifecycle import FINISHED
from elasticjob_operator.core.mirrored import Records, rendezvous_view
from elasticjob_operator.core.observed import Observed, SeenTrouble
from elasticjob_operator.core.plan import plan
from elasticjob_operator.core.rendezvous_view import UNREADABLE
from elasticjob_operator.core.status import next_status
from elasticjob_operator.mirror import Mirror
from elasticjob_operator.model import Phase

TICK_SECONDS = 0.5
"""Refresh interval of progress and elapsed time without other events."""
COALESCE_SECONDS = 0.02
"""Delay that merges simultaneous events, such as the ends of a launcher and its agent."""
END_SECONDS = 5.0
"""Time for a finished job's pods to end, in addition to the job's grace period."""
STILLBORN = 5
"""Maximum number of consecutive pods that fail before their first round."""


class Loop:
    """Reconcile loop of one job. Setting `killed` ends it at once."""

    def __init__(
        self,
        stored: StoredJob,
        processes: Processes,
        mirror: Mirror | AskedAgents,
        kubelet: Kubelet,
        applier: Applier,
        book: RoundBook,
        show: Callable[[Observed], None],
        trouble: Callable[[], SeenTrouble | None] = lambda: None,
    ) -> None:
        self._stored = stored
        self._processes = processes
        self._mirror = mirror
        self._kubelet = kubelet
        self._applier = applier
        self._book = book
        self._show = show
        self._trouble = trouble
        self._wake = asyncio.Event()
        self._stillborn: list[LocalPod] = []
        self.killed = asyncio.Event()

    def wake(self) -> None:
        """Trigger a reconcile soon."""
        self._wake.set()

    async def run(self) -> None:
        """Run until the job is over; raises `CommandError` if it cannot continue here."""
        over = False
        while not over:
            self._wake.clear()
            planned = plan(self._stored.job, self._observe(), datetime.now(UTC))
            await self._applier.apply(planned)
            over = self._look()
            if not over:
                await self._pause(planned.wake_at)

    async def follow_mirror(self) -> None:
        """Wake the loop at each change of this job's rendezvous, until cancelled."""
        async for prefix in self._mirror.changes():
            if prefix == self._applier.prefix:
                self.wake()

    def launcher_ended(self, pod: LocalPod) -> None:
        """Record a pod that failed before its first round; the next one would fail as well."""
        if not self._book.seated(pod.name):
            self._stillborn.append(pod)

    def _records(self) -> Records | None:
        return self._mirror.records(self._applier.prefix)

    def _observe(self) -> Observed:
        found = self._records()
        members = [member.id for member in found.members] if found else []
        if not is_steered(self._stored.job):
            pods = self._kubelet.observed(members)
            if isinstance(self._mirror, AskedAgents):
                pods = self._mirror.heard(pods)
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
            incarnation=self._applier.incarnation,
            store=self._trouble(),
        )

    def _look(self) -> bool:
        """Observe, then write and show the status; return True if the run is over."""
        observed, found = self._observe(), self._records()
        if found is not None and self._book.take(found):
            self._stillborn.clear()
            self._stored.save_rounds(self._book.rounds())
        now = datetime.now(UTC)
        status = next_status(self._stored.job, observed, observed.rendezvous, now)
        self._stored.set_status(status)
        self._show(observed)
        self._check_stillborn(status.phase)
        return self._over()

    def _check_stillborn(self, phase: Phase | None) -> None:
        pods = self._kubelet.pods.values()
        if pods and all(pod.refused for pod in pods):
            raise CommandError(f"no pod could be started: {next(iter(pods)).refused}")
        if len(self._stillborn) >= STILLBORN and phase not in FINISHED:
            last = self._stillborn[-1]
            # The newest pods' output may not be written yet.
            said = last_words(*(pod.files.logs / TRAINER for pod in reversed(self._stillborn)))
            raise CommandError(
                f"{len(self._stillborn)} pods ended before they were in a round, the last one with "
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
            if self._processes.gone.is_set():
                raise WardenGone
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
        due = ended + winding_down(job) + timedelta(seconds=END_SECONDS)
        return now > due or all(pod.launcher_exit for pod in pods.values())
