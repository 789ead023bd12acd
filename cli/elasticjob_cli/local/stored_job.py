"""Object of a local job: parsed by its readers, and kept and written by its runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import ValidationError

from elasticjob_cli.errors import CommandError, ExitCode
from elasticjob_cli.local.job_store import JobFolder, write_json
from elasticjob_operator.domain.explain.phrases import stop_report
from elasticjob_operator.domain.manifests.job_command import program_digest
from elasticjob_operator.domain.status.goodput import carried_over
from elasticjob_operator.model import ElasticJob, Status
from elasticjob_operator.model.parse import problems
from elasticjob_operator.model.status import PodCounts
from elasticjob_operator.model.types import ConditionStatus, ConditionType, Phase


def read_job(folder: JobFolder) -> ElasticJob:
    """Return the parsed object of a job. Raises `CommandError`."""
    document = folder.object()
    try:
        return ElasticJob.model_validate(document)
    except ValidationError as error:
        raise folder.unreadable(str(problems(error)[0])) from error


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Outcome: the last object, every round as in `rounds.json`, and the exit code.

    `has_lost_files` is True if logs or other files could not be written.
    """

    job: ElasticJob
    rounds: list[dict[str, Any]]
    exit_code: ExitCode
    seconds: float
    has_lost_files: bool = False


class StoredJob:
    """Current object. Calls `changed` at each change; `save` writes the object if it differs.

    `trouble` gets the errors of failed writes, which do not stop the run.
    """

    def __init__(
        self,
        job: ElasticJob,
        folder: JobFolder,
        changed: Callable[[], None],
        trouble: Callable[[str], None],
    ) -> None:
        self.job = admit(job)
        self._folder = folder
        self._changed = changed
        self._trouble = trouble
        self._written: ElasticJob | None = None
        self.stopped = False

    @property
    def deleted(self) -> bool:
        return self.job.metadata.deletion_timestamp is not None

    def continue_former(self) -> None:
        """Take over the step that an unfinished former run of this job has reached.

        Only `save` writes it, since the folder still has the files of the former run. Snapshots in
        storage continue under the name of the job, so the steps after the last one of them are
        repeated.
        """
        try:
            former = read_job(self._folder).status
        except CommandError:
            return
        if former.phase is Phase.SUCCEEDED:
            return
        kept = carried_over(former.snapshots, program_digest(self.job))
        if kept is not None:
            status = self.job.status.model_copy(update={"snapshots": kept})
            self.job = self.job.model_copy(update={"status": status})

    def change_spec(self, **fields: object) -> None:
        """Replace fields of the spec, as a user's edit would."""
        generation = self.job.metadata.generation + 1
        self._replace(
            spec=self.job.spec.model_copy(update=fields),
            metadata=self.job.metadata.model_copy(update={"generation": generation}),
        )

    @property
    def planned(self) -> ElasticJob:
        """Object for the plan: that of a suspended job once its user has stopped it.

        The stored spec stays as its author wrote it, so that it can be run again.
        """
        if not self.stopped:
            return self.job
        policy = self.job.spec.run_policy.model_copy(update={"suspend": True})
        spec = self.job.spec.model_copy(update={"run_policy": policy})
        return self.job.model_copy(update={"spec": spec})

    def stop(self) -> None:
        """Stop the job at its user's request, as a suspension does."""
        self.stopped = True
        self._changed()

    def delete(self) -> None:
        """Mark the job as deleted, as `kubectl delete` does."""
        stamp = {"deletion_timestamp": datetime.now(UTC)}
        self._replace(metadata=self.job.metadata.model_copy(update=stamp))

    def set_status(self, status: Status) -> None:
        """Write the status without calling `changed`."""
        if self.stopped:
            status = _stopped_by_user(status)
        self.job = self.job.model_copy(update={"status": status})
        self.save()

    def pods_ended(self) -> None:
        """Complete a suspension whose pods were killed before the loop could observe their end."""
        status = self.job.status
        if status.phase is not Phase.SUSPENDING:
            return
        conditions = [
            one.model_copy(update={"reason": f"Job{Phase.SUSPENDED}"})
            if one.reason == f"Job{Phase.SUSPENDING}"
            else one.model_copy(update={"status": ConditionStatus.TRUE, "reason": Phase.SUSPENDED})
            if one.type is ConditionType.SUSPENDED
            else one
            for one in status.conditions
        ]
        nothing = {"pods": PodCounts(), "members": [], "nodes": 0, "ready_nodes": 0}
        update = {"phase": Phase.SUSPENDED, "conditions": conditions, **nothing}
        self.set_status(status.model_copy(update=update))

    def save(self) -> None:
        if self.job != self._written:
            self._written = self.job
            self._write(self._folder.status_file, self.job.manifest())

    def save_rounds(self, rounds: list[dict[str, Any]]) -> None:
        self._write(self._folder.rounds_file, rounds)

    def _replace(self, **parts: object) -> None:
        self.job = self.job.model_copy(update=parts)
        self._changed()

    def _write(self, path: Path, document: Mapping[str, Any] | list[dict[str, Any]]) -> None:
        try:
            full = write_json(path, document)
        except OSError as error:
            self._trouble(f"{path}: {error.strerror}")
        else:
            if full is not None:
                self._trouble(f"{path.parent}: {full.strerror}")


STOPPED_BY_USER = "StoppedByUser"
"""Reason of condition Suspended of a local job that its user stopped."""


def _stopped_by_user(status: Status) -> Status:
    """Return the status with the reason for the suspension, which the spec does not give."""
    report = stop_report(status.last_stop)
    message = "its user stopped it" + ("" if report is None else f"; {report.text}")
    changed = {"reason": STOPPED_BY_USER, "message": message}
    conditions = [
        one.model_copy(update=changed)
        if one.type is ConditionType.SUSPENDED and one.status is ConditionStatus.TRUE
        else one
        for one in status.conditions
    ]
    return status.model_copy(update={"conditions": conditions})


def admit(job: ElasticJob) -> ElasticJob:
    """Return the object as an API server would store it at creation."""
    document = job.manifest()
    document["metadata"] |= {
        "uid": str(uuid4()),
        "generation": 1,
        "creationTimestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    document.pop("status", None)
    return ElasticJob.model_validate(document)
