"""One local run of one job: observe, plan, apply, write the status; until the job has ended.

The plan and the status are the operator's own; this is the edge that carries them out with
processes. Everything that happens only wakes the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

from elasticjob_cli import settings
from elasticjob_cli.errors import CommandError, ExitCode
from elasticjob_cli.local import control, etcd
from elasticjob_cli.local.apply import Applier
from elasticjob_cli.local.container import Trainer
from elasticjob_cli.local.logs import TRAINER, WORKERS, Tail, pods
from elasticjob_cli.local.pods import Kubelet
from elasticjob_cli.local.processes import Exit, Processes, WardenGone
from elasticjob_cli.local.programs import PodPrograms
from elasticjob_cli.local.records import RoundBook
from elasticjob_cli.local.state import JobFolder, Run, write_json
from elasticjob_cli.local.verbs import Verbs
from elasticjob_cli.local.view import NodeRow, Snapshot, View
from elasticjob_operator.core.lifecycle import FINISHED
from elasticjob_operator.core.mirrored import Records, rendezvous_view
from elasticjob_operator.core.observed import Observed
from elasticjob_operator.core.plan import plan
from elasticjob_operator.core.rendezvous_view import UNREADABLE
from elasticjob_operator.core.status import next_status
from elasticjob_operator.mirror import Mirror
from elasticjob_operator.model import ElasticJob, Phase
from elasticjob_rendezvous.etcd.client import Client

TICK_SECONDS = 0.5
"""How often progress and elapsed time are looked at when nothing else happens."""
COALESCE_SECONDS = 0.02
"""What comes together, such as a launcher's and its agent's end, is planned for together."""
END_SECONDS = 5.0
"""Beyond the job's own grace, for pods of a finished job to be gone."""
STILLBORN = 5
"""Pods that may fail before they have ever been in the rendezvous, one after the other."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The outcome of a run: the last object, every round, and the exit code."""

    job: ElasticJob
    rounds: list[dict[str, Any]]
    exit_code: ExitCode
    seconds: float


class LocalRun:
    """Runs one job to its end. `job` is the object as it is now, status included."""

    def __init__(
        self, job: ElasticJob, trainer: Trainer, view: View, manifest: Path, console_logs: bool
    ) -> None:
        self.job = _admitted(job)
        self.trainer = trainer
        self.folder = JobFolder(job.metadata.namespace, job.metadata.name)
        self.interrupted = False
        self._view = view
        self._manifest = manifest
        self._console_logs = console_logs
        self._began = time.monotonic()
        self._book = RoundBook(time.time_ns() // 1_000_000)
        self._wake = asyncio.Event()
        self._killed = asyncio.Event()
        self._written: ElasticJob | None = None
        self._troubles: set[str] = set()
        self._stillborn = 0

    # -- what others tell the run

    @property
    def elapsed_seconds(self) -> float:
        return time.monotonic() - self._began

    def note(self, text: str) -> None:
        """Something happened: show it, and look again at everything."""
        if text:
            self._view.note(self.elapsed_seconds, text)
        self._wake.set()

    def interrupt(self, reason: str) -> None:
        """Drain and end, as a suspension does; told twice, kill."""
        if self.interrupted:
            self._killed.set()
            return
        self.interrupted = True
        policy = self.job.spec.run_policy.model_copy(update={"suspend": True})
        self.change_spec(run_policy=policy)
        self.note(f"{reason}: draining; once more kills")

    def change_spec(self, **fields: object) -> None:
        """Replace fields of the spec, as a user's edit would."""
        metadata = self.job.metadata
        self.job = self.job.model_copy(
            update={
                "spec": self.job.spec.model_copy(update=fields),
                "metadata": metadata.model_copy(update={"generation": metadata.generation + 1}),
            }
        )
        self._wake.set()

    def delete(self) -> None:
        """Ask for the end of the job, as `kubectl delete` does."""
        stamp = {"deletion_timestamp": datetime.now(UTC)}
        self.job = self.job.model_copy(
            update={"metadata": self.job.metadata.model_copy(update=stamp)}
        )
        self.note("deleted: draining")

    # -- the run

    async def run(self) -> Ended:
        """Raises `CommandError` when the local cluster itself cannot work."""
        etcd.find_etcd()
        self.folder.acquire()
        try:
            run_dir = settings.run_dir()
            self._processes = Processes(self._exited, self._trouble)
            await self._processes.open(run_dir)
            try:
                await self._in_cluster(run_dir)
            except ExceptionGroup as group:
                raise _first_command_error(group) from group
            finally:
                await self._processes.aclose()
        finally:
            self.folder.release()
        return Ended(self.job, self._book.rounds(), self._exit_code(), self.elapsed_seconds)

    async def _in_cluster(self, run_dir: Path) -> None:
        """With etcd, the mirror, the pods and the control socket around it."""
        self._etcd = etcd.EtcdServer(self._processes, run_dir, self.folder.logs / "etcd.log")
        self._save()
        await self._etcd.start()
        programs = PodPrograms(
            self.job, self.trainer, settings.base_environment(), run_dir, self._etcd.endpoint
        )
        programs.build()
        async with (
            Client([self._etcd.endpoint], request_timeout_seconds=2.0) as client,
            asyncio.TaskGroup() as tasks,
        ):
            self._mirror = Mirror(client)
            self._kubelet = Kubelet(
                self._processes, run_dir, self.folder.logs, programs, tasks, self.note
            )
            self._applier = Applier(client, self._mirror, self._kubelet, programs.prefix, self)
            helpers = [
                tasks.create_task(self._mirror.run()),
                tasks.create_task(self._follow_mirror()),
                tasks.create_task(self._follow_logs()),
            ]
            verbs = Verbs(self, self._kubelet, self._processes)
            server = await control.serve(run_dir / "control.sock", verbs.act)
            self._announce(run_dir)
            try:
                with self._signals():
                    await self._loop()
            finally:
                verbs.ended.set()
                server.close()
                self._kubelet.stop()
                for helper in helpers:
                    helper.cancel()

    async def _loop(self) -> None:
        over = False
        while not over:
            self._wake.clear()
            now = datetime.now(UTC)
            planned = plan(self.job, self._observe(), now)
            await self._applier.apply(planned)
            over = self._look()
            if not over:
                await self._pause(planned.wake_at)

    def _observe(self) -> Observed:
        found = self._records()
        members = [member.id for member in found.members] if found else []
        return Observed(
            pods=self._kubelet.observed(members),
            rendezvous=UNREADABLE if found is None else rendezvous_view(found),
            bounds=found.bounds if found else self._applier.bounds,
            incarnation=self._applier.incarnation,
        )

    def _records(self) -> Records | None:
        return self._mirror.records(self._applier.prefix)

    def _look(self) -> bool:
        """Take in what is, write and show it; true when the run is over."""
        observed, found = self._observe(), self._records()
        if found is not None and self._book.take(found):
            self._stillborn = 0
            self._guarded_write(self.folder.rounds_file, self._book.rounds())
        status = next_status(self.job, observed, observed.rendezvous, datetime.now(UTC))
        self.job = self.job.model_copy(update={"status": status})
        self._save()
        self._show(observed)
        return self._over(status.phase)

    async def _pause(self, wake_at: datetime | None) -> None:
        """Until something happens or `wake_at`; meanwhile the picture is kept fresh."""
        while True:
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
            if self._over(self.job.status.phase):
                return
            self._show(self._observe())

    def _over(self, phase: Phase | None) -> bool:
        if self._killed.is_set():
            return True
        if self.job.metadata.deletion_timestamp is not None or phase is Phase.SUSPENDED:
            return not self._kubelet.pods
        if phase not in FINISHED:
            return False
        ended = self.job.status.completion_time or datetime.now(UTC)
        spec = self.job.spec
        grace = spec.recovery.stop_grace_seconds + spec.rendezvous.confirm_seconds + END_SECONDS
        late = datetime.now(UTC) > ended + timedelta(seconds=grace)
        return late or all(pod.launcher_exit for pod in self._kubelet.pods.values())

    def _exit_code(self) -> ExitCode:
        if self.job.status.phase is Phase.SUCCEEDED:
            return ExitCode.SUCCEEDED
        stopped = self.interrupted or self.job.metadata.deletion_timestamp is not None
        return ExitCode.INTERRUPTED if stopped else ExitCode.FAILED

    # -- events

    def _exited(self, end: Exit) -> None:
        if end.name == etcd.NAME:
            if self._etcd.endpoint:
                self.note(f"etcd ended ({end}): starting it again with its data")
                self._kubelet.spawn(self._etcd.again())
            return
        pod = self._kubelet.pods.get(end.name.split("/")[1])
        found = self._mirror.records(self._applier.prefix)
        self._kubelet.exited(end)
        if pod is None or found is None or not end.name.endswith("/launcher") or end.code == 0:
            return
        self._stillborn += not any(seat["pod"] == pod.name for seat in self._seats())
        if self._stillborn >= STILLBORN:
            self._applier.give_up(
                f"{STILLBORN} pods ended before they were in a round, the last one with {end}; "
                f"see {pod.files.logs}"
            )

    def _seats(self) -> list[dict[str, Any]]:
        return [seat for item in self._book.rounds() for seat in item["seats"]]

    def _trouble(self, message: str) -> None:
        """A disk that is full or read-only is said once, and stops nothing."""
        if message not in self._troubles:
            self._troubles.add(message)
            self.note(f"cannot be written, the job goes on without: {message}")

    async def _follow_mirror(self) -> None:
        async for prefix in self._mirror.changes():
            if prefix == self._applier.prefix:
                self._wake.set()

    async def _follow_logs(self) -> None:
        tails: dict[str, Tail] = {}
        while self._console_logs:
            for pod in pods(self.folder.logs):
                for line in tails.setdefault(pod, Tail(self.folder.logs / pod / TRAINER)).lines():
                    self._view.output(pod, line)
            await asyncio.sleep(0.1)

    @contextlib.contextmanager
    def _signals(self) -> Any:
        """Ctrl-C, SIGTERM and a closed terminal drain the job."""
        loop = asyncio.get_running_loop()
        names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
        for signum, name in names.items():
            loop.add_signal_handler(signum, self.interrupt, name)
        try:
            yield
        finally:
            for signum in names:
                loop.remove_signal_handler(signum)

    # -- what is written and shown

    def _announce(self, run_dir: Path) -> None:
        socket_path = str(run_dir / "control.sock")
        self.folder.write_run(Run(os.getpid(), socket_path, str(self._manifest), time.time()))
        self.note(f"logs and status in {self.folder.path}")

    def _save(self) -> None:
        if self.job != self._written:
            self._written = self.job
            self._guarded_write(self.folder.status_file, self.job.manifest())

    def _guarded_write(self, path: Path, document: Any) -> None:
        try:
            write_json(path, document)
        except OSError as error:
            self._trouble(f"{path}: {error.strerror}")

    def _show(self, observed: Observed) -> None:
        rendezvous = observed.rendezvous
        ranks = self._book.ranks(rendezvous.round)
        states = {member.pod: member for member in rendezvous.members}
        rows = []
        for pod in sorted(observed.pods, key=lambda pod: pod.index):
            member = states.get(pod.name)
            state = "leaving" if pod.terminating else "starting" if pod.active else str(pod.phase)
            if member is not None and pod.active:
                state = member.state
            shown = ranks.get(pod.name, "") if member is not None and pod.active else ""
            rows.append(NodeRow(pod.name, shown, state, member.round if member else 0))
        self._view.show(Snapshot(self.job, self.elapsed_seconds, tuple(rows), self._progress()))

    def _progress(self) -> dict[str, Any]:
        """What the script says of itself: the newest file, for rank 0 moves between pods."""
        files = list(self.folder.logs.glob(f"*/{WORKERS}/*/progress.json"))
        try:
            newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
            document = json.loads(newest.read_bytes()) if newest else {}
        except (OSError, ValueError):
            return {}
        return document if isinstance(document, dict) else {}


def _admitted(job: ElasticJob) -> ElasticJob:
    """The object as an API server would store it at its creation."""
    document = job.manifest()
    document["metadata"] |= {
        "uid": str(uuid4()),
        "generation": 1,
        "creationTimestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    document.pop("status", None)
    return ElasticJob.model_validate(document)


def _first_command_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The message for the user among what went wrong at once; else the group itself."""
    found = group.subgroup(CommandError)
    if found is None:
        return group
    error: BaseException = found
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
