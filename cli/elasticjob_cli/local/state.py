"""What a local job leaves on disk: its folder, its lock, its last status.

`${XDG_STATE_HOME:-~/.local/state}/elasticjob/<namespace>/<name>/` holds

| file          | what                                                                |
|---------------|---------------------------------------------------------------------|
| `lock`        | held by the runner, and its warden, for as long as one of them lives|
| `run.json`    | the run: runner's pid, control socket, manifest                     |
| `status.json` | the ElasticJob object with its status, replaced atomically          |
| `rounds.json` | every round of the run: cause, times, who had which rank            |
| `logs/`       | `<pod>/` each container's output, `workers/` by round and local rank|

Only the runner writes here; `delete` removes the folder of a job that does not run.
"""

from __future__ import annotations

import errno
import fcntl
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.settings import state_root
from elasticjob_cli.wholefile import overwrite, swap
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.enums import ConditionType, Phase, RendezvousState
from elasticjob_operator.model.problems import field_path
from elasticjob_rendezvous.core.typed import echoed

DEFAULT_NAMESPACE = "default"
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
"""What a namespace or a name may be; as both are folders here, nothing else is looked for."""


_UNFINISHED = (Phase.PENDING, Phase.RUNNING, Phase.RESTARTING)


@dataclass(frozen=True, slots=True)
class Run:
    """The run that owns the folder, or owned it last."""

    pid: int
    control: str
    manifest: str
    began_unix: float


class JobFolder:
    """The folder of one local job."""

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
        """Whether a runner holds this job."""
        try:
            with (self.path / "lock").open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def acquire(self) -> int:
        """Take the job for this process; what an earlier run left is cleared away.

        Returns the lock's file descriptor, which other processes may share.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "lock").open("ab")
        except OSError as error:
            raise CommandError(
                f"the state of local jobs cannot be written: {error.filename}: {error.strerror}; "
                "set XDG_STATE_HOME to a folder that can"
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
                + f"; watch it with `elasticjob get {self.name}{there} -w`, end it with "
                f"`elasticjob delete {self.name}{there}`, or give this one another name with --name"
            ) from None
        self.clear()
        return self._lock.fileno()

    def clear(self) -> None:
        """Remove everything but the lock."""
        for entry in self.path.iterdir():
            if entry.name != "lock":
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove(self) -> None:
        """Forget the job."""
        shutil.rmtree(self.path, ignore_errors=True)

    def write_run(self, run: Run) -> None:
        write_json(self.path / "run.json", asdict(run))

    def run(self) -> Run | None:
        try:
            return Run(**json.loads((self.path / "run.json").read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def object(self) -> dict[str, Any]:
        """Return the ElasticJob object as it was last written, in the phase Interrupted where its
        runner ended before the job did.

        Raises `CommandError` where it is not there or cannot be parsed.
        """
        running = self.running()  # first: what a runner writes before it ends is then read
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
            raise self._unreadable(f"it is no JSON: {error}") from error
        if not running and document.get("status", {}).get("phase") in _UNFINISHED:
            document["status"] = _interrupted(document["status"])
        return document

    def _unreadable(self, why: str | None) -> CommandError:
        there = "" if self.namespace == DEFAULT_NAMESPACE else f" -n {self.namespace}"
        return CommandError(
            f'the status of local job "{self.name}" cannot be read: {self.status_file}: {why}. '
            "It was damaged, or written by another release: `elasticjob run` begins the job anew, "
            f"`elasticjob delete {self.name}{there}` forgets it"
        )

    def rounds(self) -> list[dict[str, Any]]:
        """Every round of the run; none where they were damaged or are of another release."""
        try:
            document: list[dict[str, Any]] = json.loads(self.rounds_file.read_bytes())
            whole = all(item.keys() >= {"round", "worldSize", "seats"} for item in document)
        except (OSError, ValueError, TypeError, AttributeError):
            return []
        return document if whole else []


def _interrupted(status: dict[str, Any]) -> dict[str, Any]:
    """The last status of a runner that is gone, without what no longer runs."""
    conditions = [
        {**condition, "status": "False", "reason": f"Job{Phase.INTERRUPTED}", "message": ""}
        if condition["type"] in (ConditionType.RUNNING, ConditionType.RESTARTING)
        else condition
        for condition in status.get("conditions", ())
    ]
    nothing: dict[str, Any] = {"phase": Phase.INTERRUPTED.value, "conditions": conditions}
    nothing |= {"nodes": 0, "pods": 0, "readyNodes": 0, "members": [], "explanation": []}
    if rendezvous := status.get("rendezvous"):
        nothing["rendezvous"] = {**rendezvous, "state": RendezvousState.UNKNOWN.value}
    return {**status, **nothing}


def write_json(path: Path, document: Mapping[str, Any] | list[Any]) -> OSError | None:
    """Replace a file by a JSON document: a reader sees the old one or the new one, whole.

    On a full disk, where there is no room for both, it takes the old one's, without indentation,
    and what the disk said is returned.
    """
    try:
        swap(path, (json.dumps(document, indent=2) + "\n").encode())
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not path.exists():
            raise
        overwrite(path, (json.dumps(document, separators=(",", ":")) + "\n").encode())
        return error
    return None


def jobs(namespace: str | None) -> list[JobFolder]:
    """Every local job of a namespace, or of all of them, by name."""
    found = []
    for status in state_root().glob("*/*/status.json"):
        owner, name = status.parts[-3:-1]
        ours = LABEL.fullmatch(owner) and LABEL.fullmatch(name)  # else somebody else's folder
        if ours and namespace in (None, owner):
            found.append(JobFolder(owner, name))
    return sorted(found, key=lambda folder: (folder.namespace, folder.name))


def job(namespace: str, name: str) -> JobFolder:
    """A job that exists; an error that lists those there are otherwise."""
    folder = JobFolder(namespace, name)
    if not folder.exists():
        raise unknown_job(namespace, name)
    return folder


def unknown_job(namespace: str, name: str) -> CommandError:
    there = ", ".join(folder.name for folder in jobs(namespace))
    return CommandError(
        f'local job "{name}" not found in namespace "{namespace}"; '
        + (f"there is: {there}" if there else "there are none: start one with `elasticjob run`")
    )
