"""Composition root of a local run of one job.

Sets up etcd, the informer cache, the pods, the control socket and the loop, and tears all of them
down at the end, after errors too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from elasticjob_agent import signals
from elasticjob_agent.tempdirs import TempDir
from elasticjob_cli import settings
from elasticjob_cli.errors import CommandError, ExitCode, Interrupted
from elasticjob_cli.local import control, etcd
from elasticjob_cli.local.cluster import POLLING, NoSecrets, fetch_report
from elasticjob_cli.local.container import Trainer
from elasticjob_cli.local.control import ControlCommands
from elasticjob_cli.local.display import (
    Snapshot,
    View,
    node_rows,
    read_progress,
    transition_text,
)
from elasticjob_cli.local.job_store import JobFolder, Run, add_event
from elasticjob_cli.local.kubelet import Kubelet
from elasticjob_cli.local.logs import TRAINER, Tail, pods_with_output
from elasticjob_cli.local.processes import Exit, Processes
from elasticjob_cli.local.programs import PodPrograms
from elasticjob_cli.local.reconciler import LocalRendezvous, ReconcileLoop
from elasticjob_cli.local.round_log import RoundLog
from elasticjob_cli.local.stored_job import RunOutcome, StoredJob
from elasticjob_cli.local.supervisor import PRIVATE_UMASK
from elasticjob_cli.log_lines import without_time
from elasticjob_cli.settings import LOOPBACK
from elasticjob_operator.domain.manifests.owned_objects import Access
from elasticjob_operator.domain.observed.etcd_records import Records
from elasticjob_operator.domain.observed.state import Observed
from elasticjob_operator.domain.plan.sizes import wanted_size
from elasticjob_operator.model import ElasticJob, Phase
from elasticjob_operator.model.types import Backend
from elasticjob_operator.reconcile.job_memory import (
    JobKey,
    JobMemory,
    OwnedMemory,
    RendezvousMemory,
)
from elasticjob_operator.rendezvous.agent_poller import AgentPoller
from elasticjob_operator.rendezvous.agents_source import AgentsSource
from elasticjob_operator.rendezvous.etcd_source import Etcd, EtcdSource
from elasticjob_operator.rendezvous.informer_cache import InformerCache
from elasticjob_rendezvous.etcd.client import Client
from elasticjob_rendezvous.etcd.probe import STORE, EtcdProbe
from elasticjob_rendezvous.protocol.records.keys import ROOT, job_prefix
from elasticjob_rendezvous.store_monitor import StoreMonitor

OUTPUT_SECONDS = 0.1
REQUEST_SECONDS = 2.0


class LocalRun:
    """Local run of one job to its end."""

    def __init__(
        self, job: ElasticJob, trainer: Trainer, view: View, manifest: str, console_logs: bool
    ) -> None:
        self._folder = JobFolder(job.metadata.namespace, job.metadata.name)
        self._stored = StoredJob(job, self._folder, self._wake, self._trouble)
        self._trainer = trainer
        self._view = view
        self._manifest = manifest
        self._console_logs = console_logs
        self._began = time.monotonic()
        self._round_log = RoundLog(time.time_ns() // 1_000_000)
        self._troubles: set[str] = set()
        self._transition = ""
        self._tails: dict[str, Tail] = {}
        self._interrupted = False
        self._setup: asyncio.Task[object] | None = None
        self._backend = job.spec.rendezvous.backend
        self._program: Path | None = None
        self._etcd: etcd.EtcdServer | None = None
        self._kubelet: Kubelet | None = None
        self._loop: ReconcileLoop | None = None

    async def run(self) -> RunOutcome:
        """Run the job; raises `CommandError` if the local cluster fails or was interrupted."""
        user_umask = os.umask(PRIVATE_UMASK)
        try:
            with signals.handle_signals(self._interrupt, to_the_end=True):  # until the teardown
                return await self._run(user_umask)
        finally:
            os.umask(user_umask)

    async def _run(self, user_umask: int) -> RunOutcome:
        if self._backend is not Backend.C10D:
            self._program = etcd.find_etcd(self._backend is Backend.ETCD_V2)
            etcd.check_open_files(wanted_size(self._stored.job).nodes)
        lock = self._folder.acquire()
        try:
            self._stored.continue_former()
            self._folder.clear()
            self._stored.save()
            scratch = settings.run_dir()
            self._processes = Processes(self._exited, self._trouble)
            await self._processes.open(scratch.path, lock, user_umask)
            try:
                await self._until_all_ended(scratch)
            except ExceptionGroup as group:
                raise _first_command_error(group) from group
            except asyncio.CancelledError:
                if not self._interrupted:
                    raise
                raise Interrupted("interrupted before the job began; nothing is running") from None
            self._stored.pods_ended()
        finally:
            self._folder.release()
        return RunOutcome(
            self._stored.job,
            self._round_log.rounds(),
            self._exit_code(),
            self._elapsed(),
            bool(self._troubles),
        )

    async def _until_all_ended(self, scratch: TempDir) -> None:
        try:
            with self._warnings():
                await self._run_parts(scratch.path)
        finally:
            self._setup = None
            await self._processes.aclose()
            scratch.close()  # the supervisor has removed it, unless it was killed

    async def _run_parts(self, run_dir: Path) -> None:
        """Set up etcd, informer cache, pods and control socket; run the loop; tear them down."""
        self._setup = asyncio.current_task()
        if self._interrupted:
            raise asyncio.CancelledError
        endpoint, environment = await self._endpoint(run_dir), settings.base_environment()
        programs = PodPrograms(
            self._stored.job, self._trainer, environment, run_dir, endpoint, self._folder.claims
        )
        programs.build()
        async with AsyncExitStack() as stack:
            client: Client | None = None
            if self._backend is Backend.ETCD:
                made = Client([endpoint], request_timeout_seconds=REQUEST_SECONDS)
                client = await stack.enter_async_context(made)
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            kubelet = Kubelet(
                self._processes, run_dir, self._folder.logs, programs, tasks, self._note
            )
            memory = _memory(self._stored.job, programs.job_key_file.read_bytes().strip())
            if client is None:
                rendezvous, watched = self._agents_rendezvous(kubelet, memory)
            else:
                rendezvous, watched = self._etcd_rendezvous(client, endpoint, memory)
            loop = ReconcileLoop(
                self._stored,
                self._processes,
                kubelet,
                rendezvous,
                self._round_log,
                self._show,
                self._note,
            )
            self._kubelet, self._loop, self._setup = kubelet, loop, None
            helpers = [tasks.create_task(work) for work in (*watched, self._follow_output())]
            commands = ControlCommands(self._stored, kubelet, self._processes, self._note)
            server = await control.serve(run_dir / control.SOCKET, commands.act)
            self._announce(run_dir)
            try:
                await loop.run()
                self._show_output(last=True)
            finally:
                for tail in self._tails.values():
                    tail.close()
                server.close()
                kubelet.stop()
                for helper in helpers:
                    helper.cancel()

    def _etcd_rendezvous(
        self, client: Client, endpoint: str, memory: JobMemory
    ) -> tuple[LocalRendezvous, list[Coroutine[Any, Any, None]]]:
        """Return the rendezvous in the run's etcd, and the work that keeps it current."""
        cache, monitor = InformerCache(client), self._monitor(client, endpoint)
        metadata = self._stored.job.metadata
        source = EtcdSource(
            Etcd(client, cache, monitor=monitor), NoSecrets(), metadata.namespace, metadata.uid
        )

        def records() -> Records | None:
            newest = memory.rendezvous.incarnation or 1
            return cache.records(job_prefix(metadata.namespace, metadata.uid, newest))

        async def follow() -> None:
            async for _ in cache.changes():
                self._wake()

        return LocalRendezvous(source, memory, records), [cache.run(), follow(), monitor.run()]

    def _agents_rendezvous(
        self, kubelet: Kubelet, memory: JobMemory
    ) -> tuple[LocalRendezvous, list[Coroutine[Any, Any, None]]]:
        """Return the rendezvous as the agents report it, and the work that polls them."""
        metadata = self._stored.job.metadata
        poller = AgentPoller(lambda *_: self._wake(), polling=POLLING, request=fetch_report)
        source = AgentsSource(poller, NoSecrets(), metadata.namespace, metadata.uid)
        rendezvous = LocalRendezvous(
            source,
            memory,
            lambda: poller.records(metadata.uid, kubelet.pods.keys(), kubelet.without_agents()),
            partial(poller.has_seen_end, metadata.uid),
        )
        return rendezvous, [poller.run()]

    def _monitor(self, client: Client, endpoint: str) -> StoreMonitor:
        """Return a monitor of the run's etcd; the view shows its findings, from the status."""
        return StoreMonitor(
            STORE,
            endpoint,
            EtcdProbe(client, ROOT, lambda: 1),
            lambda trouble: self._wake(),
            lambda note: None,
        )

    async def _endpoint(self, run_dir: Path) -> str:
        """Return the agents' rendezvous endpoint: this run's own etcd, or a port for c10d."""
        if self._program is None:
            return f"{LOOPBACK}:{etcd.free_ports(1)[0]}"
        log, v2 = self._folder.logs / "etcd.log", self._backend is Backend.ETCD_V2
        server = etcd.EtcdServer(self._program, self._processes, run_dir, log, v2)
        self._etcd = server
        await server.start()
        return server.endpoint

    def _exit_code(self) -> ExitCode:
        if self._stored.job.status.phase is Phase.SUCCEEDED:
            return ExitCode.SUCCEEDED
        stopped = self._interrupted or self._stored.stopped or self._stored.deleted
        return ExitCode.INTERRUPTED if stopped else ExitCode.FAILED

    # -- events

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.wake()

    def _note(self, text: str) -> None:
        """Show and keep an event, and wake the loop."""
        if text:
            self._view.note(self._elapsed(), text)
            self._keep(text)
        self._wake()

    def _keep(self, text: str) -> None:
        """Add an event to the job's file; a full disk costs the event alone."""
        with contextlib.suppress(OSError):
            add_event(self._folder.events_file, text, datetime.now(UTC))

    def _trouble(self, message: str) -> None:
        """Report a full or read-only disk once; the job continues."""
        if message not in self._troubles:
            self._troubles.add(message)
            self._note(f"some files cannot be written; the job continues: {message}")

    def _interrupt(self, signum: signal.Signals) -> None:
        self._drain("Ctrl-C" if signum == signal.SIGINT else signum.name)

    def _drain(self, reason: str) -> None:
        """Stop the job after a checkpoint, as a suspension does; kill it at the second request.

        During setup, cancel the setup instead.
        """
        if self._loop is None:
            if self._setup is not None and not self._interrupted:
                self._setup.cancel()
            self._interrupted = True
        elif not self._interrupted:
            self._interrupted = True
            self._note(f"{reason}: stopping the job; a second signal kills it")
            self._stored.stop()
        else:
            self._loop.killed.set()
            self._loop.wake()

    def _exited(self, end: Exit) -> None:
        if self._kubelet is None or self._loop is None:
            return  # etcd during its start
        if end.name == etcd.NAME and self._etcd is not None:
            self._note(f"etcd ended ({end}): restarting it with its data")
            self._kubelet.spawn(self._etcd.again())
            return
        pod = self._kubelet.exited(end)
        if pod is not None and end.code != 0 and not pod.terminating and not pod.killed:
            self._loop.launcher_ended(pod)

    async def _follow_output(self) -> None:
        """Show the containers' output, if requested, until cancelled."""
        while self._console_logs:
            self._show_output()
            await asyncio.sleep(OUTPUT_SECONDS)

    def _show_output(self, last: bool = False) -> None:
        for pod in pods_with_output(self._folder.logs) if self._console_logs else ():
            tail = self._tails.setdefault(pod, Tail(self._folder.logs / pod / TRAINER))
            if self._view.congested and not last:
                return  # the files keep the lines
            for line in tail.lines():
                self._view.output(pod, without_time(line))

    @contextlib.contextmanager
    def _warnings(self) -> Iterator[None]:
        """Show log warnings of the operator's modules in the view instead of over it."""
        handler = _NoteHandler(self)
        root = logging.getLogger()
        root.addHandler(handler)
        try:
            yield
        finally:
            root.removeHandler(handler)

    # -- output

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _announce(self, run_dir: Path) -> None:
        socket_path = str(run_dir / control.SOCKET)
        try:
            self._folder.write_run(Run(os.getpid(), socket_path, self._manifest, time.time()))
        except OSError as error:
            self._trouble(f"{self._folder.path}: {error.strerror}")
        self._note(f"logs and status in {self._folder.path}")
        self._note(self._trainer.note)

    def _show(self, observed: Observed) -> None:
        rows = node_rows(observed, self._round_log.ranks(observed.rendezvous.round))
        progress = read_progress(self._folder.logs)
        self._view.show(Snapshot(self._stored.job, self._elapsed(), rows, progress))
        if (text := transition_text(self._stored.job.status)) != self._transition:
            self._transition = text
            self._keep(text)
        if self._view.gone and not self._interrupted:
            self._drain("the output was closed")  # as when a terminal is closed


class _NoteHandler(logging.Handler):
    """Log handler that turns warnings into notes of the run."""

    def __init__(self, run: LocalRun) -> None:
        super().__init__(logging.WARNING)
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        self._run._note(record.getMessage())


def _memory(job: ElasticJob, job_key: bytes) -> JobMemory:
    """Return the memory of a new job, whose only incarnation is that of this run."""
    metadata = job.metadata
    return JobMemory(
        JobKey(metadata.namespace, metadata.name),
        metadata.uid,
        rendezvous=RendezvousMemory(1, goes_on=True),
        owned=OwnedMemory(Access(job_key, None, None, None)),
    )


def _first_command_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first CommandError or OSError of the group; else the group itself."""
    found = group.subgroup(CommandError) or group.subgroup(OSError)
    if found is None:
        return group
    error: BaseException = found
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
