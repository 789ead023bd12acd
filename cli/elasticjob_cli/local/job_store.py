"""Job store: folder, lock, object and last status of each local job on disk.

`${XDG_STATE_HOME:-~/.local/state}/elasticjob/<namespace>/<name>/` holds

| file          | content                                                             |
|---------------|---------------------------------------------------------------------|
| `lock`        | held by the runner and its supervisor while either of them lives    |
| `run.json`    | the run: runner's pid, control socket, manifest                     |
| `status.json` | the ElasticJob object with its status, replaced atomically          |
| `rounds.json` | every round of the run: cause, times, rank assignments              |
| `events.jsonl`| the events of the run, one a line: its newest megabyte              |
| `logs/`       | `<pod>/` each container's output, `workers/` by round and local rank|

A job of a Python function also has `elasticjob/.functions/<namespace>/<name>/`. Its working folder
in it, with checkpoints, is kept by the next run. Snapshots for a PersistentVolumeClaim are in
`elasticjob/.claims/<namespace>/<claim>/<name>/`, and are kept too.

Only its user can enter the folders: manifests and logs may hold secrets. Only the runner
writes the files of a job; `delete` removes the folders of a job that does not run. The stored
object takes the place of an API server.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.output import overwrite_in_place, replace_atomically
from elasticjob_cli.settings import state_root
from elasticjob_operator.enums import ConditionType, Phase, RendezvousState
from elasticjob_rendezvous.protocol.text import echoed

DEFAULT_NAMESPACE = "default"
PRIVATE_FOLDER = 0o700
EVENTS_BYTES = 1 << 20
"""Maximum size of the file of events."""
ROOT_UID = 0
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""Pattern of namespaces and names; both are folder names here, others are ignored."""


RUNNER_GONE = (
    "The process that ran the job ended before the job did, and nothing of it is running: "
    "`elasticjob run` starts it again, and a script that keeps checkpoints resumes from the last."
)
"""Note on a job in phase Interrupted, or without a status."""

_UNFINISHED_PHASES = (
    Phase.PENDING,
    Phase.RUNNING,
    Phase.RESTARTING,
    Phase.SUSPENDING,
    Phase.DELETING,
)
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


def check_label(value: str, field: str) -> None:
    """Raise `BadInput` for a namespace or name that is not a DNS label."""
    if not LABEL.fullmatch(value):
        raise BadInput(f"the {field} of a job must be a DNS label, not {echoed(value)}")


class JobFolder:
    """Folder of one local job."""

    def __init__(self, namespace: str, name: str) -> None:
        check_label(namespace, "namespace")
        check_label(name, "name")
        self.namespace = namespace
        self.name = name
        self.path = state_root() / namespace / name
        self.logs = self.path / "logs"
        self.functions = state_root() / ".functions" / namespace / name
        """Folder of a function job: pickled calls, return values, and its working folder."""
        self.claims = state_root() / ".claims" / namespace
        """Folder with a folder for each PersistentVolumeClaim that jobs name for snapshots."""
        self._lock: IO[bytes] | None = None

    @property
    def status_file(self) -> Path:
        return self.path / "status.json"

    @property
    def rounds_file(self) -> Path:
        return self.path / "rounds.json"

    @property
    def events_file(self) -> Path:
        return self.path / "events.jsonl"

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
        """Lock the job for this process; the files of an earlier run stay until `clear`.

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
            raise self.already_running() from None
        return self._lock.fileno()

    def already_running(self, in_python: bool = False) -> BadInput:
        """Return the error for a second run of a running job.

        Args:
            in_python: name the calls of the Python client instead of the commands.
        """
        run = self.run()
        text = f'job "{self.name}" is already running on this machine'
        text += f" (process {run.pid}, from {run.manifest})" if run else ""
        if in_python:
            return BadInput(
                f'{text}; get it with `client.job("{self.name}")`, which can `wait()` for it or '
                '`delete()` it, or give this one another name with `job.renamed("NAME")`'
            )
        there = "" if self.namespace == DEFAULT_NAMESPACE else f" -n {self.namespace}"
        return BadInput(
            f"{text}; watch it with `elasticjob get {self.name}{there} -w`, stop it with "
            f"`elasticjob delete {self.name}{there}`, or give this one another name with --name"
        )

    def clear(self) -> None:
        """Remove everything except the lock, which this process must hold, and the object.

        Readers see the object of the former run until that of the next one replaces it.
        """
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name not in ("lock", self.status_file.name):
                entry.unlink()

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove(self) -> None:
        """Delete the job's folders."""
        for folder in (self.path, self.functions):
            shutil.rmtree(folder, ignore_errors=True)

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

        The fields are unchecked: `read_job` parses them. Raises `CommandError` if the object is
        missing or not a JSON object.
        """
        running = self.running()  # before the read, so that a runner's last write is not missed
        try:
            document = json.loads(self.status_file.read_bytes())
        except FileNotFoundError:
            raise unknown_job(self.namespace, self.name) from None
        except OSError as error:
            raise self.unreadable(error.strerror or type(error).__name__) from error
        except json.JSONDecodeError as error:
            place = f"line {error.lineno}, column {error.colno}"
            raise self.unreadable(f"must be JSON; the fault is in {place}") from error
        except (ValueError, RecursionError) as error:
            raise self.unreadable("must be JSON, in UTF-8 and not nested too deeply") from error
        if not isinstance(document, dict) or not isinstance(document.get("metadata"), dict):
            raise self.unreadable("must be an ElasticJob with metadata")
        status = document.get("status")
        if not running and isinstance(status, dict) and status.get("phase") in _UNFINISHED_PHASES:
            document["status"] = _interrupted(status)
        return document

    def unreadable(self, cause: str) -> CommandError:
        """Return the error for a damaged status."""
        there = "" if self.namespace == DEFAULT_NAMESPACE else f" -n {self.namespace}"
        return CommandError(
            f'the status of local job "{self.name}" cannot be read: {self.status_file}: {cause}. '
            "It was damaged, or written by another release: `elasticjob run` starts the job again, "
            f"`elasticjob delete {self.name}{there}` deletes it"
        )

    def rounds(self) -> list[dict[str, Any]]:
        """Return every round of the run; none if damaged or written by another release."""
        try:
            document: list[dict[str, Any]] = json.loads(self.rounds_file.read_bytes())
            whole = all(item.keys() >= {"round", "worldSize", "seats"} for item in document)
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return []
        return document if whole else []

    def events(self) -> list[dict[str, str]]:
        """Return the events of the run, oldest first, without damaged ones."""
        try:
            lines = self.events_file.read_bytes().splitlines()
        except OSError:
            return []
        found = []
        for line in lines:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                event = json.loads(line)
                found.append({"time": str(event["time"]), "message": str(event["message"])})
        return found


def add_event(path: Path, text: str, at: datetime, most_bytes: int = EVENTS_BYTES) -> None:
    """Append an event to a file; beyond `most_bytes` drop the older half. Raises OSError."""
    stamp = f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03}Z"
    line = json.dumps({"time": stamp, "message": text}).encode() + b"\n"
    with path.open("ab") as file:
        file.write(line)
        size = file.tell()
    if size > most_bytes:
        kept = path.read_bytes()[-most_bytes // 2 :]
        replace_atomically(path, kept[kept.index(b"\n") + 1 :])


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
    found = status.get("conditions")
    for condition in found if isinstance(found, list) else ():
        if not isinstance(condition, dict):
            pass  # damaged: `read_job` reports it
        elif condition.get("type") in _OF_A_RUN:
            condition = {**condition, **now, "status": "False"}
        elif condition.get("reason") in phase_reasons:
            condition = {**condition, **now}
        conditions.append(condition)
    nothing: dict[str, Any] = {"phase": Phase.INTERRUPTED.value, "conditions": conditions}
    nothing |= {"nodes": 0, "pods": {}, "readyNodes": 0, "members": [], "explanation": []}
    rendezvous = status.get("rendezvous")
    if rendezvous and isinstance(rendezvous, dict):
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
    if namespace is not None:
        check_label(namespace, "namespace")
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
