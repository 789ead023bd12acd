"""Local jobs as a source of the dashboard: the job store and the logs on disk."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import BinaryIO

from elasticjob_cli.commands.explain import local_explanation
from elasticjob_cli.dashboard.sources import (
    BYTES_PER_POD,
    MAX_PODS,
    PODS_OF_JOB,
    Details,
    Jobs,
    Json,
    Logs,
    Unavailable,
    chosen_pods,
    last_lines,
)
from elasticjob_cli.errors import CommandError
from elasticjob_cli.local.job_store import JobFolder, find_job, list_jobs
from elasticjob_cli.local.logs import TRAINER, pods_with_output
from elasticjob_cli.local.stored_job import read_job
from elasticjob_cli.log_lines import LogOptions, parsed_lines


class LocalJobs:
    """Implementation of `Source`: this user's jobs on this machine."""

    title = "this machine"

    def jobs(self, namespace: str | None) -> Jobs:
        found, errors = [], []
        try:
            folders = list_jobs(namespace)
        except CommandError as error:
            raise Unavailable(HTTPStatus.BAD_REQUEST, str(error)) from error
        for folder in folders:
            try:
                found.append(folder.object())
            except CommandError as error:
                errors.append(str(error))
        return Jobs(found, errors)

    def details(self, namespace: str, name: str) -> Details:
        folder = self._folder(namespace, name)
        running = folder.running()  # before the read, so that a runner's last write is not missed
        try:
            document = folder.object()
        except CommandError as error:
            raise Unavailable(HTTPStatus.INTERNAL_SERVER_ERROR, str(error)) from error
        try:
            sentences = local_explanation(read_job(folder), running)
        except CommandError as error:
            sentences = (str(error),)
        return Details(document, folder.rounds(), sentences)

    def logs(
        self, namespace: str, name: str, options: LogOptions, document: Json | None = None
    ) -> Logs:
        folder = self._folder(namespace, name)
        pods = pods_with_output(folder.logs)
        if options.pod is None and not pods:
            return Logs(pods, [])
        names, note = chosen_pods(pods, options, MAX_PODS if document is None else PODS_OF_JOB)
        ends = [parsed_lines(pod, _end_of(folder.logs / pod / TRAINER)) for pod in names]
        return Logs(pods, last_lines(ends, options, folder.rounds()), note)

    def _folder(self, namespace: str, name: str) -> JobFolder:
        try:
            return find_job(namespace, name)
        except CommandError as error:
            raise Unavailable(HTTPStatus.NOT_FOUND, str(error)) from error


def _end_of(path: Path) -> Iterator[str]:
    """Yield the last lines of a file, of which at most `BYTES_PER_POD` are read.

    The lines before a rotation are those of its `.1`.
    """
    try:
        with path.open("rb") as file:
            text, is_cut = _end_bytes(file, BYTES_PER_POD)
            inode = os.fstat(file.fileno()).st_ino
    except FileNotFoundError:
        return
    if len(text) < BYTES_PER_POD:
        with suppress(FileNotFoundError), path.with_name(f"{path.name}.1").open("rb") as older:
            if os.fstat(older.fileno()).st_ino != inode:  # else it was rotated after the read
                earlier, is_cut = _end_bytes(older, BYTES_PER_POD - len(text))
                text = earlier + text
    lines = deque(text.split(b"\n"))
    if is_cut:
        lines.popleft()  # its beginning is missing
    if lines and not lines[-1]:
        lines.pop()
    yield from (line.decode(errors="replace") for line in lines)


def _end_bytes(file: BinaryIO, most: int) -> tuple[bytes, bool]:
    """Return the end of a file, and True if that is not all of it."""
    size = os.fstat(file.fileno()).st_size
    file.seek(max(0, size - most))
    return file.read(most), size > most
