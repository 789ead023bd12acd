"""Places where the jobs of the Python client run: a cluster, by kubectl, and this machine."""

from __future__ import annotations

import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Protocol

from elasticjob_cli.client.definition import ElasticJob
from elasticjob_cli.client.functions import return_values, with_call
from elasticjob_cli.commands import cluster_actions
from elasticjob_cli.commands.cluster_logs import cluster_lines
from elasticjob_cli.commands.cluster_reader import ClusterReader
from elasticjob_cli.commands.explain import local_explanation
from elasticjob_cli.commands.logs import local_lines
from elasticjob_cli.commands.tables import Cells
from elasticjob_cli.errors import BadInput, CommandError, ExitCode
from elasticjob_cli.kubectl import Kubectl
from elasticjob_cli.local.control_client import delete_job, no_resume, send_command
from elasticjob_cli.local.job_store import JobFolder, find_job, list_jobs
from elasticjob_cli.local.stored_job import read_job
from elasticjob_cli.log_lines import Line, LogOptions
from elasticjob_operator import model
from elasticjob_operator.domain.plan.lifecycle import FINISHED

START_SECONDS = 120.0
"""Maximum time of a runner until the job runs: it loads its modules and starts etcd."""
END_SECONDS = 20.0
"""Maximum time of a runner to end that was interrupted before the job began."""
CLUSTER_POLL_SECONDS = 2.0
LOCAL_POLL_SECONDS = 0.1
_PREFIX = "elasticjob: "

log = logging.getLogger("elasticjob.client")


@dataclass(frozen=True, slots=True)
class Reading:
    """Object of a job at one moment; `ended` is True if it changes no more by itself."""

    job: model.ElasticJob
    ended: bool


class Place(Protocol):
    """Jobs of one namespace, on this machine or on a cluster. Each call may raise `CommandError`.

    The calls block. None of them needs or starts an event loop, so they also work inside one.
    """

    @property
    def poll_seconds(self) -> float:
        """Interval between two readings of a job that is watched."""

    def submit(self, job: ElasticJob, python: str | None) -> None: ...

    def names(self) -> Sequence[str]: ...

    def read(self, name: str) -> Reading: ...

    def scale(self, name: str, nodes: int) -> int:
        """Write the number of nodes; return the legal size."""

    def suspend(self, name: str) -> None: ...

    def resume(self, name: str, job: ElasticJob | None, python: str | None) -> None: ...

    def delete(self, name: str) -> None: ...

    def lines(self, name: str, options: LogOptions) -> Iterator[Line]: ...

    def rounds(self, name: str) -> Sequence[dict[str, Any]]: ...

    def return_values(
        self, job: model.ElasticJob, rounds: Sequence[dict[str, Any]]
    ) -> dict[int, Any]:
        """Return the values of a function job's workers by rank; none for another job."""

    def explanation(self, name: str) -> tuple[str, ...]: ...


class ClusterPlace:
    """Implementation of `Place`: the jobs of a namespace of a cluster."""

    poll_seconds = CLUSTER_POLL_SECONDS

    def __init__(self, kubectl: Kubectl) -> None:
        self._there = ClusterReader.of(kubectl)

    def submit(self, job: ElasticJob, python: str | None) -> None:
        """Apply the job, as `elasticjob apply` does: an existing job of its name is changed."""
        if python is not None:
            raise BadInput("python must not be given on a cluster: the job's image has it")
        if job.call is not None:
            raise BadInput(
                "a function can run on this machine alone: put it into a script in an image, and "
                "use ElasticJob.from_command"
            )
        cluster_actions.applied_text(self._there, job.manifest_text())

    def names(self) -> Sequence[str]:
        return [Cells(job).text("metadata", "name") for job in self._there.jobs(None)]

    def read(self, name: str) -> Reading:
        job = self._there.job(name)
        return Reading(job, job.status.phase in FINISHED)

    def scale(self, name: str, nodes: int) -> int:
        return cluster_actions.scaled(self._there, name, nodes)

    def suspend(self, name: str) -> None:
        cluster_actions.set_suspended(self._there, name, True)

    def resume(self, name: str, job: ElasticJob | None, python: str | None) -> None:
        cluster_actions.set_suspended(self._there, name, False)

    def delete(self, name: str) -> None:
        cluster_actions.deletion(self._there, [name]).check()

    def lines(self, name: str, options: LogOptions) -> Iterator[Line]:
        return cluster_lines(self._there, name, options)

    def rounds(self, name: str) -> Sequence[dict[str, Any]]:
        rounds = self._there.job(name).status.rounds
        return [round_.model_dump(by_alias=True, mode="json") for round_ in rounds]

    def return_values(
        self, job: model.ElasticJob, rounds: Sequence[dict[str, Any]]
    ) -> dict[int, Any]:
        return {}

    def explanation(self, name: str) -> tuple[str, ...]:
        return self._there.explain(name).sentences


class LocalPlace:
    """Implementation of `Place`: the jobs of a namespace of this machine.

    A job's runner is `elasticjob run` in a session of its own: no signal of this process's terminal
    or kernel reaches it, and it continues when this process ends.
    """

    poll_seconds = LOCAL_POLL_SECONDS

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def submit(self, job: ElasticJob, python: str | None) -> None:
        """Start a runner, and return once the job runs."""
        found = JobFolder(self._namespace, job.name)
        if found.running():
            raise found.already_running(in_python=True)
        if job.call is not None:
            job = with_call(job, job.call, found)
        command = [sys.executable, "-m", "elasticjob_cli", "run", "--plain"]
        command += ["--python", python or sys.executable, "-"]
        with tempfile.TemporaryFile() as manifest, tempfile.TemporaryFile() as errors:
            manifest.write(job.in_namespace(self._namespace).manifest_text().encode())
            manifest.seek(0)
            try:
                runner = subprocess.Popen(
                    command,
                    cwd=job.folder,
                    stdin=manifest,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                )
            except OSError as error:
                raise CommandError(
                    f"the runner of the job cannot be started: {error.strerror}: {error.filename}"
                ) from error
            # It reaps the runner, even after the object of the job is gone.
            threading.Thread(target=runner.wait, name="elasticjob-runner", daemon=True).start()
            try:
                self._wait_until_started(found, runner, errors)
            except BaseException:
                _end(runner)
                raise

    def _wait_until_started(
        self, folder: JobFolder, runner: subprocess.Popen[bytes], errors: IO[bytes]
    ) -> None:
        """Return once the runner has announced its run; raise its error if it ends before."""
        due = time.monotonic() + START_SECONDS
        while True:
            ended = runner.poll() is not None  # before the read, so that its last write counts
            run = folder.run()
            if run is not None and run.pid == runner.pid:
                for line in _lines(errors):
                    log.warning("%s", line)
                return
            if ended:
                message = "\n".join(_lines(errors)) or f"the runner ended ({runner.returncode})"
                bad = runner.returncode == ExitCode.BAD_INPUT
                raise BadInput(message) if bad else CommandError(message)
            if time.monotonic() > due:
                raise CommandError(f"the job did not start within {START_SECONDS:.0f} s")
            time.sleep(LOCAL_POLL_SECONDS / 2)

    def names(self) -> Sequence[str]:
        return [folder.name for folder in list_jobs(self._namespace)]

    def read(self, name: str) -> Reading:
        folder = self._found(name)
        running = folder.running()  # before the read, so that a runner's last write is not missed
        return Reading(read_job(folder), not running)

    def scale(self, name: str, nodes: int) -> int:
        return int(send_command(self._found(name), "scale", nodes=nodes)["wanted"])

    def suspend(self, name: str) -> None:
        send_command(self._found(name), "suspend")

    def resume(self, name: str, job: ElasticJob | None, python: str | None) -> None:
        """Submit the job again, which continues from its last checkpoint."""
        folder = self._found(name)
        if job is None or folder.running():
            raise no_resume(folder)
        self.submit(job, python)

    def delete(self, name: str) -> None:
        delete_job(self._found(name))

    def lines(self, name: str, options: LogOptions) -> Iterator[Line]:
        return local_lines(self._found(name), options)

    def rounds(self, name: str) -> Sequence[dict[str, Any]]:
        return self._found(name).rounds()

    def return_values(
        self, job: model.ElasticJob, rounds: Sequence[dict[str, Any]]
    ) -> dict[int, Any]:
        return return_values(job, self._found(job.metadata.name), rounds)

    def explanation(self, name: str) -> tuple[str, ...]:
        reading = self.read(name)
        return local_explanation(reading.job, not reading.ended)

    def _found(self, name: str) -> JobFolder:
        return find_job(self._namespace, name)


def _lines(errors: IO[bytes]) -> list[str]:
    """Return the lines that the runner wrote to its standard error."""
    errors.seek(0)
    text = errors.read().decode(errors="replace")
    return [line.removeprefix(_PREFIX) for line in text.splitlines() if line.strip()]


def _end(runner: subprocess.Popen[bytes]) -> None:
    """End a runner whose job has not begun; it removes its files and processes."""
    if runner.poll() is not None:
        return
    runner.terminate()
    try:
        runner.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        runner.kill()
