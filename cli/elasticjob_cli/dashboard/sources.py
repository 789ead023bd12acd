"""Port of the places whose jobs a dashboard shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Protocol

from elasticjob_cli.log_lines import Line, LogOptions, merged, parsed_rounds, selected

Json = dict[str, Any]
MAX_LINES = 2000
"""Maximum number of lines of a page."""
MAX_PODS = 32
"""Maximum number of pods whose logs are read for one page."""
PODS_OF_JOB = 8
"""The same for the page of a job, which has few lines."""
BYTES_PER_POD = 256 << 10
"""Maximum size of the end of a pod's log that is read for one page."""
BYTES_PER_PAGE = 1 << 20
"""Maximum size of the logs that are read for one page."""


class Unavailable(Exception):
    """Answer of a place that has no such job, or does not show it to this viewer."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class TooLarge(Unavailable):
    """Answer of a place that is larger than the reader admits."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """Objects of jobs, and an error for each job that could not be read."""

    documents: Sequence[Json]
    errors: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Details:
    """Object of one job, its rounds from the oldest, and the explanation of its state."""

    document: Json
    rounds: Sequence[Json]
    explanation: Sequence[str]


@dataclass(frozen=True, slots=True)
class Logs:
    """Names of the pods with output, and the end of the output of those that were chosen."""

    pods: Sequence[str]
    lines: Sequence[Line]
    note: str = ""


class Source(Protocol):
    """Place of the jobs. Each call may raise `Unavailable` and may block."""

    @property
    def title(self) -> str:
        """Name of the place."""

    def jobs(self, namespace: str | None) -> Jobs:
        """Return the jobs of one or all namespaces."""

    def details(self, namespace: str, name: str) -> Details: ...

    def logs(
        self, namespace: str, name: str, options: LogOptions, document: Json | None = None
    ) -> Logs:
        """Return the last `options.tail` lines, of one pod or rank if the options name one.

        Args:
            namespace: namespace of the job.
            name: name of the job.
            options: selection of the lines.
            document: object of the job for its own page, which has the output of fewer pods.
        """


def last_lines(
    pods: Iterable[Iterable[Line]], options: LogOptions, rounds: Iterable[Json]
) -> list[Line]:
    """Return the chosen lines of pods in order of time, with marks between rounds."""
    known = parsed_rounds(rounds)
    now = datetime.now(UTC)
    return list(selected(iter([merged(pods)]), options, now, lambda: known))


def chosen_pods(
    pods: Sequence[str], options: LogOptions, most: int = MAX_PODS
) -> tuple[list[str], str]:
    """Return the pods whose logs are read, and a note if they are not all. Raises `Unavailable`."""
    if options.pod is None:
        cut = f"only the first {most} of {len(pods)} pods" if len(pods) > most else ""
        return list(pods[:most]), cut
    if options.pod not in pods:
        raise Unavailable(HTTPStatus.NOT_FOUND, "the job has no output of this pod")
    return [options.pod], ""


def object_list(found: object) -> list[Json]:
    """Return the objects of a list in a status; none if it is damaged."""
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
