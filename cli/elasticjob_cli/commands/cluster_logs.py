"""Logs of a job's pods on a cluster: kubectl reads each pod.

The log so far is merged by time. When following, a thread for each pod reads later lines, also of
pods that the operator creates meanwhile.
"""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from elasticjob_cli.commands.cluster_reader import ClusterReader
from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.kubectl import Kubectl, NoAnswer, Refused
from elasticjob_cli.log_lines import (
    Line,
    LogOptions,
    Round,
    check_rank,
    check_round,
    merged,
    parsed_lines,
    parsed_rounds,
    selected,
)
from elasticjob_cli.output import show
from elasticjob_operator.domain.manifests.names import uid_selector
from elasticjob_operator.domain.plan.lifecycle import FINISHED
from elasticjob_operator.model import ElasticJob
from elasticjob_rendezvous.protocol.records.roster import natural_order

LIST_SECONDS = 2.0
"""Interval between two lists of the pods."""
END_SECONDS = 2.0
"""Time in which a kubectl that follows a log ends at SIGTERM."""
MAX_SILENCES = 2
"""Number of reads of the job in a row without an answer at which following ends."""
BATCH_SECONDS = 0.2
"""Time in which lines of several pods are collected, to merge them."""


def cluster_lines(kubectl: Kubectl, name: str, options: LogOptions) -> Iterator[Line]:
    """Return the chosen lines of a job. Raises `CommandError`."""
    there = ClusterReader.of(kubectl)
    job = there.job(name)
    check_round(_rounds(job), options.round)
    launch = job.status.launch
    check_rank(None if launch is None else launch.mode, options.rank)
    pods = _pods(there, job)
    if options.pod is not None and options.pod not in pods:
        raise BadInput(f'job "{name}" has no pod {options.pod}; pods: {", ".join(pods)}')
    if not pods and not options.follow:
        raise CommandError(f'job "{name}" has no pods: `explain` states the reason')
    reader = _Reader(there, job, options)
    return selected(reader.batches(), options, datetime.now(UTC), lambda: reader.rounds)


def _rounds(job: ElasticJob) -> list[Round]:
    return parsed_rounds(item.model_dump(by_alias=True, mode="json") for item in job.status.rounds)


def _pods(there: ClusterReader, job: ElasticJob) -> dict[str, str]:
    """Return the phase of each pod of a job by name, in order."""
    pods = there.items("pods", "--selector", uid_selector(job.metadata.uid))
    found: dict[str, Any] = {raw["metadata"]["name"]: raw.get("status") or {} for raw in pods}
    return {name: found[name].get("phase", "") for name in sorted(found, key=natural_order)}


def _check(errors: Mapping[str, CommandError]) -> None:
    """Raise `CommandError` if there are errors, each with the name of its pod."""
    if errors:
        texts = (f"{pod}: {error}" for pod, error in errors.items())
        raise CommandError("\n".join(("the logs of some pods cannot be read:", *texts)))


def _is_deleted(error: CommandError) -> bool:
    return isinstance(error, Refused) and error.reason == "NotFound"


def _await_end(process: subprocess.Popen[str]) -> None:
    """Wait for the end of a process that has SIGTERM; kill it if it ignores the signal."""
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _Reader:
    """Reader of the pods' logs in batches of lines."""

    def __init__(self, there: ClusterReader, job: ElasticJob, options: LogOptions) -> None:
        self._there = there
        self._job = job
        self._options = options
        self._words = ["--container", job.trainer().name, "--timestamps"]
        self._last: dict[str, str] = {}
        self._ended: set[str] = set()
        self._last_reads: set[str] = set()
        """Pods whose log is read, or was, since the end of the job: no later read has more."""
        self._errors: dict[str, CommandError] = {}
        """Error of the last read, by pod."""
        self._followed: dict[str, subprocess.Popen[str]] = {}
        self._lines: queue.SimpleQueue[Line | str] = queue.SimpleQueue()
        self._silences = 0
        self.rounds = _rounds(job)

    def batches(self) -> Iterator[Iterator[Line]]:
        """Yield the log so far, then, when following, later lines.

        The log of an evicted pod is gone, and a lost machine does not answer: the others are read
        all the same. Raises `CommandError` at the end for those that could not be read.
        """
        parts, errors = [], self._errors
        for pod in self._begun():
            try:
                parts.append(self._so_far(pod))
            except CommandError as error:
                errors[pod] = error
        if errors and not parts:
            raise next(iter(errors.values()))
        yield merged(parts)
        if not self._options.follow:
            _check(errors)
            return
        for pod, reason in errors.items():
            show(f"elasticjob: {pod}: {reason}", err=True)
        try:
            while not self._is_over():
                due = time.monotonic() + LIST_SECONDS
                while time.monotonic() < due:
                    yield iter(self._collected())
            yield iter(self._collected())
            _check(errors)
        finally:
            for process in self._followed.values():
                process.terminate()
            for process in self._followed.values():
                _await_end(process)

    def _begun(self) -> list[str]:
        """Return the chosen pods whose container has started: others have no log."""
        only = self._options.pod
        phases = _pods(self._there, self._job).items()
        return [pod for pod, phase in phases if phase != "Pending" and only in (None, pod)]

    def _so_far(self, pod: str) -> list[Line]:
        words = list(self._words)
        if self._options.since is not None:
            words.append(f"--since={max(1, int(self._options.since.total_seconds()))}s")
        output = self._there.call("logs", pod, *words)
        lines = list(parsed_lines(pod, output.splitlines()))
        self._last[pod] = lines[-1].time if lines else ""
        return lines

    def _is_over(self) -> bool:
        """Read the job and follow its new pods; return True if nothing is left to follow."""
        try:
            self._job = self._there.job(self._job.metadata.name)
            begun = self._begun()
        except NoAnswer as error:  # the connections of the logs are silent, too
            self._silences += 1
            if self._silences == MAX_SILENCES:
                raise
            show(f"elasticjob: {error}; trying again", err=True)
            return False
        except CommandError as error:  # deleted, or the cluster is out of reach
            if not self._followed and not _is_deleted(error):
                raise
            return not self._followed
        self._silences = 0
        self.rounds = _rounds(self._job)
        finished = self._job.status.phase in FINISHED
        for pod in self._errors.keys() & self._last.keys() - self._followed.keys() - set(begun):
            del self._errors[pod]  # it was read until it was deleted
        for pod in begun:
            if pod not in self._followed and pod not in self._ended | self._last_reads:
                self._follow(pod)
                if finished:
                    self._last_reads.add(pod)
        return not self._followed and finished

    def _follow(self, pod: str) -> None:
        since = self._last.get(pod, "")
        words = [*self._words, "--follow"]
        words += [f"--since-time={since[:19]}Z"] if since else []
        command = ["kubectl", "logs", pod, *words, *self._there.where()]
        self._followed[pod] = process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # its text would reach the terminal as it is
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._read, args=(pod, process, since), daemon=True).start()

    def _read(self, pod: str, process: subprocess.Popen[str], since: str) -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in parsed_lines(pod, (raw.rstrip("\n") for raw in output)):
                if line.time > since:
                    self._lines.put(line)
        self._lines.put(pod)  # its log, or the connection, has ended

    def _collected(self) -> list[Line]:
        """Return the lines of the next moment in order of time."""
        found: list[Line] = []
        time.sleep(BATCH_SECONDS)
        with suppress(queue.Empty):
            while True:
                item = self._lines.get_nowait()
                if isinstance(item, Line):
                    self._last[item.pod] = item.time
                    found.append(item)
                elif code := self._followed.pop(item).wait():
                    error = CommandError(f"`kubectl logs` has ended with exit code {code}")
                    self._errors.setdefault(item, error)
                else:
                    self._ended.add(item)
                    self._errors.pop(item, None)
        return sorted(found, key=lambda line: line.time)
