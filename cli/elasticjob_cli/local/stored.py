"""Stored ElasticJob object of a local run and its file; takes the place of an API server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from elasticjob_cli.local.state import JobFolder, write_json
from elasticjob_operator.model import ElasticJob, Status


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
        self.job = admitted(job)
        self._folder = folder
        self._changed = changed
        self._trouble = trouble
        self._written: ElasticJob | None = None

    @property
    def deleted(self) -> bool:
        return self.job.metadata.deletion_timestamp is not None

    def change_spec(self, **fields: object) -> None:
        """Replace fields of the spec, as a user's edit would."""
        generation = self.job.metadata.generation + 1
        self._replace(
            spec=self.job.spec.model_copy(update=fields),
            metadata=self.job.metadata.model_copy(update={"generation": generation}),
        )

    def suspend(self) -> None:
        policy = self.job.spec.run_policy
        self.change_spec(run_policy=policy.model_copy(update={"suspend": True}))

    def delete(self) -> None:
        """Mark the job as deleted, as `kubectl delete` does."""
        stamp = {"deletion_timestamp": datetime.now(UTC)}
        self._replace(metadata=self.job.metadata.model_copy(update=stamp))

    def set_status(self, status: Status) -> None:
        """Write the status without calling `changed`."""
        self.job = self.job.model_copy(update={"status": status})
        self.save()

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


def admitted(job: ElasticJob) -> ElasticJob:
    """Return the object as an API server would store it at creation."""
    document = job.manifest()
    document["metadata"] |= {
        "uid": str(uuid4()),
        "generation": 1,
        "creationTimestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    document.pop("status", None)
    return ElasticJob.model_validate(document)
