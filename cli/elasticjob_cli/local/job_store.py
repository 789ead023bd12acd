"""Job store: folder, lock, object and last status of each local job on disk.

`${XDG_STATE_HOME:-~/.local/state}/elasticjob/<namespace>/<name>/` holds

| file          | content                                                             |
|---------------|---------------------------------------------------------------------|
| `lock`        | held by the runner and its supervisor while either of them lives    |
| `run.json`    | the run: runner's pid, control socket, manifest                     |
| `status.json` | the ElasticJob object with its status, replaced atomically          |
| `rounds.json` | every round of the run: cause, times, rank assignments              |
| `logs/`       | `<pod>/` each container's output, `workers/` by round and local rank|

Only its user can enter the folder: manifests and logs may hold secrets. Only the runner writes
here; `delete` removes the folder of a job that does not run. The stored
object takes the place of an API server.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from pydantic import ValidationError

from elasticjob_cli.errors import BadInput, CommandError, ExitCode
from elasticjob_cli.output import overwrite_in_place, replace_atomically
from elasticjob_cli.settings import state_root
from elasticjob_operator.domain.explain.phrases import stop_report
from elasticjob_operator.model import ElasticJob, Status
from elasticjob_operator.model.problems import field_path
from elasticjob_operator.model.status import PodCounts
from elasticjob_operator.model.types import ConditionStatus, ConditionType, Phase, RendezvousState
from elasticjob_rendezvous.protocol.text import echoed


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """Outcome: the last object, every round as in `rounds.json`, and the exit code."""

    job: ElasticJob
    rounds: list[dict[str, Any]]
    exit_code: ExitCode
    seconds: float


DEFAULT_NAMESPACE = "default"
PRIVATE_FOLDER = 0o700
ROOT_UID = 0
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""Pattern of namespaces and names; both are folder names here, others are ignored."""


_UNFINISHED_PHASES = (Phase.PENDING, Phase.RUNNING, Phase.RESTARTING, Phase.SUSPENDING)
_OF_A_RUN = (
    ConditionType.READY,
    ConditionType.RECONCILING,
    ConditionType.RUNNING,
    ConditionType.RESTARTING,
    ConditionType.PODS_READY,
)
"""Conditions that end with the runner."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run that owns the folder, or owned it last."""

    pid: int
    control: str
    manifest: str
    began_unix: float


class JobFolder:
    """Folder of one local job."""

    def __init__(self, namespace: str, name: str) -> None:
        for value, what in ((namespace, "namespace"), (name, "name")):
            if not LABEL.fullmatch(value):
                raise BadInput(f"the {what} of a job must be a DNS label, not {echoed(value)}")
        self.namespace = namespace
        self.name = name
        self.path = state_root() / namespace / name
        self.logs = self.path / "logs"
        self._lock: IO[bytes] | None = None

    @property
    def status_file(self) -> Path:
        return self.path / "status.json"

    @property
    def rounds_file(self) -> Path:
        return self.path / "rounds.json"

    def exists(self) -> bool:
        return self.status_file.exists()

    def running(self) -> bool:
        """Return True if a runner holds this job's lock."""
        try:
            with (self.path / "lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def acquire(self) -> int:
        """Lock the job for this process and remove the files of an earlier run.

        Return the lock's file descriptor, which other processes may share.
        """
        try:
            for folder in (state_root(), self.path.parent, self.path):
                make_private(folder)
            self._lock = (self.path / "lock").open("ab")
        except OSError as error:
            raise CommandError(
                f"the state of local jobs cannot be written: {error.filename}: {error.strerror}; "
                "set XDG_STATE_HOME to a folder that can be written to"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            self._lock = None
            run = self.run()
            there = "" if self.namespace == DEFAULT_NAMESPACE else f" -n {self.namespace}"
            raise BadInput(
                f'job "{self.name}" is already running on this machine'
                + (f" (process {run.pid}, from {run.manifest})" if run else "")
                + f"; watch it with `elasticjob get {self.name}{there} -w`, stop it with "
                f"`elasticjob delete {self.name}{there}`, or give this one another name with --name"
            ) from None
        self.clear()
        return self._lock.fileno()

    def clear(self) -> None:
        """Remove everything except the lock."""
        for entry in self.path.iterdir():
            if entry.name != "lock":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove(self) -> None:
        """Delete the job's folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    def write_run(self, run: Run) -> None:
        write_json(self.path / "run.json", asdict(run))

    def run(self) -> Run | None:
        try:
            return Run(**json.loads((self.path / "run.json").read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def object(self) -> dict[str, Any]:
        """Return the ElasticJob object as last written, in phase Interrupted if its runner ended
        before the job did.

        Raises `CommandError` if it is missing or cannot be parsed.
        """
        running = self.running()  # before the read, so that a runner's last write is not missed
        try:
            document: dict[str, Any] = json.loads(self.status_file.read_bytes())
            ElasticJob.model_validate(document)
        except FileNotFoundError:
            raise unknown_job(self.namespace, self.name) from None
        except OSError as error:
            raise self._unreadable(error.strerror) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = field_path(first["loc"])
            raise self._unreadable(f"{where}: {first['msg']}" if where else first["msg"]) from error
        except ValueError as error:
            raise self._unreadable(f"it is not JSON: {error}") from error
        if not running and document.get("status", {}).get("phase") in _UNFINISHED_PHASES:
            document["status"] = _interrupted(document["status"])
        return document

    def _unreadable(self, why: str | None) -> CommandError:
        there = "" if self.namespace == DEFAULT_NAMESPACE else f" -n {self.namespace}"
        return CommandError(
            f'the status of local job "{self.name}" cannot be read: {self.status_file}: {why}. '
            "It was damaged, or written by another release: `elasticjob run` starts the job anew, "
            f"`elasticjob delete {self.name}{there}` deletes it"
        )

    def rounds(self) -> list[dict[str, Any]]:
        """Return every round of the run; none if damaged or written by another release."""
        try:
            document: list[dict[str, Any]] = json.loads(self.rounds_file.read_bytes())
            whole = all(item.keys() >= {"round", "worldSize", "seats"} for item in document)
        except (OSError, ValueError, TypeError, AttributeError):
            return []
        return document if whole else []


def make_private(folder: Path) -> None:
    """Create a folder that only this user can enter, or close an existing one to all others.

    Raises `CommandError` if another user owns it, who could replace the files in it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
    found = folder.stat()
    if found.st_uid not in (os.geteuid(), ROOT_UID):
        raise CommandError(
            f"the state of local jobs cannot be written: {folder} belongs to another user "
            f"({found.st_uid}); set XDG_STATE_HOME to a folder of yours"
        )
    if found.st_mode & ~PRIVATE_FOLDER & 0o777:
        folder.chmod(PRIVATE_FOLDER)


def _interrupted(status: dict[str, Any]) -> dict[str, Any]:
    """Return the last status of a runner that is gone, with nothing shown as running."""
    now = {"reason": f"Job{Phase.INTERRUPTED}", "message": ""}
    phase_reasons = {f"Job{phase}" for phase in _UNFINISHED_PHASES}
    conditions = []
    for condition in status.get("conditions", ()):
        if condition["type"] in _OF_A_RUN:
            condition = {**condition, **now, "status": "False"}
        elif condition.get("reason") in phase_reasons:
            condition = {**condition, **now}
        conditions.append(condition)
    nothing: dict[str, Any] = {"phase": Phase.INTERRUPTED.value, "conditions": conditions}
    nothing |= {"nodes": 0, "pods": {}, "readyNodes": 0, "members": [], "explanation": []}
    if rendezvous := status.get("rendezvous"):
        nothing["rendezvous"] = {**rendezvous, "state": RendezvousState.UNKNOWN.value}
    return {**status, **nothing}


def write_json(path: Path, document: Mapping[str, Any] | list[Any]) -> OSError | None:
    """Replace a file by a JSON document atomically.

    On a full disk without room for both, overwrite the old file in place, without indentation, and
    return the disk's error.
    """
    try:
        replace_atomically(path, (json.dumps(document, indent=2) + "\n").encode())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
            raise
        overwrite_in_place(path, (json.dumps(document, separators=(",", ":")) + "\n").encode())
        return error
    return None


def list_jobs(namespace: str | None) -> list[JobFolder]:
    """Return every local job of one or all namespaces, sorted by name."""
    found = []
    for status in state_root().glob("*/*/status.json"):
        owner, name = status.parts[-3:-1]
        ours = LABEL.fullmatch(owner) and LABEL.fullmatch(name)  # else it is not a job's folder
        if ours and namespace in (None, owner):
            found.append(JobFolder(owner, name))
    return sorted(found, key=lambda folder: (folder.namespace, folder.name))


def find_job(namespace: str, name: str) -> JobFolder:
    """Return an existing job; otherwise raise an error that lists the existing ones."""
    folder = JobFolder(namespace, name)
    if not folder.exists():
        raise unknown_job(namespace, name)
    return folder


def unknown_job(namespace: str, name: str) -> CommandError:
    there = ", ".join(folder.name for folder in list_jobs(namespace))
    return CommandError(
        f'local job "{name}" not found in namespace "{namespace}"; '
        + (f"there is: {there}" if there else "there are none; start one with `elasticjob run`")
    )


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
    """Return the status with the reason why this job is suspended, which its spec does not give."""
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
