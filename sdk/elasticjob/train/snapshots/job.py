"""Interface between `Snapshots` and the job: settings, and reports to the agent.

`ELASTICJOB_SNAPSHOTS` has the fields of `recovery.snapshots` as a JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import TYPE_CHECKING, NamedTuple

from elasticjob import layout, train

if TYPE_CHECKING:
    from collections.abc import Mapping


class JobSettings(NamedTuple):
    """Settings of the job, the defaults of arguments that the script omits; None if absent.

    Args:
        name: namespace and name of the job; empty if it is unknown, as under torchrun.
        memory_bytes: memory of a node for snapshots; 0 without a limit.
        storage: folder of this job.
    """

    every_steps: int | None = None
    every_seconds: float | None = None
    replicas: int | None = None
    memory_bytes: int = 0
    storage: str | None = None
    store_seconds: float | None = None
    keep: int | None = None
    name: str = ""


def job_settings(environ: Mapping[str, str]) -> JobSettings:
    """Return the settings in the environment; raise ValueError if they are malformed."""
    text, name = environ.get(layout.SNAPSHOTS, ""), environ.get(layout.JOB, "")
    if not text:
        return JobSettings(name=name)
    try:
        found = json.loads(text)
        storage = found.get("storage") or {}
        return JobSettings(
            found.get("everySteps"),
            found.get("intervalSeconds"),
            found.get("replicas"),
            int(found.get("memoryBytes", 0)),
            storage.get("folder"),
            storage.get("everySeconds"),
            storage.get("keep"),
            name,
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{layout.SNAPSHOTS} must be a JSON object, got {text!r}") from error


def local_rank(environ: Mapping[str, str]) -> int:
    """Return the rank of this process on its node.

    With `virtual_local_rank` of torch's agent each worker sees one device, and has LOCAL_RANK=0.
    The rank on the node then follows from RANK, if all nodes have the same number of workers.
    """
    given, workers = whole_number(environ, "LOCAL_RANK"), whole_number(environ, "LOCAL_WORLD_SIZE")
    nodes = whole_number(environ, "GROUP_WORLD_SIZE")
    is_uniform = whole_number(environ, "WORLD_SIZE") == workers * nodes
    devices = environ.get("CUDA_VISIBLE_DEVICES", "")
    if given or workers < 2 or not is_uniform or not devices or "," in devices:
        return given
    place = whole_number(environ, "RANK") - workers * whole_number(environ, "GROUP_RANK")
    return place if place in range(workers) else given


def whole_number(environ: Mapping[str, str], name: str) -> int:
    """Return the number in a variable; 0 if it is absent or has none."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else 0


def refused_memory(environ: Mapping[str, str]) -> OSError | None:
    """Return the error with which the launcher failed to create its folder; None without one."""
    number, _, parent = environ.get(layout.SNAPSHOT_TROUBLE, "").partition(" ")
    if not (number.isascii() and number.isdigit()):
        return None
    return OSError(int(number), os.strerror(int(number)), parent)


class Report:
    """Report of this worker on its snapshots, which the agent reads. Threads may change it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._report = layout.SnapshotReport()
        self._storage = 0

    def storage(self, number: int) -> None:
        """Report the errno of a failed write to storage; 0 after a successful one."""
        with self._lock:
            self._storage = number
        self.change()

    def change(self, **fields: int) -> None:
        """Replace fields of the report."""
        with self._lock:
            trouble = fields.pop("trouble", self._report.trouble)
            trouble = layout.with_storage(trouble, self._storage)
            changed = self._report._replace(**fields, trouble=trouble)
            if changed != self._report:
                self._report = changed
                train.link().snapshots(changed)


def ended_with_error() -> bool:
    """Return True if the program is known to end with an exception.

    The interpreter does not record that of `sys.exit`.
    """
    kind, value, _ = sys.exc_info()  # in the end of a process of multiprocessing
    if kind is None:
        kind = getattr(sys, "last_type", None)
        value = getattr(sys, "last_value", None)
    if kind is None:
        return False
    return not (issubclass(kind, SystemExit) and not getattr(value, "code", 1))
