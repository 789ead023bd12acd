"""Port of the places where jobs run, and a job as a place reports it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from elasticjob_cli.client.definition import ElasticJob
from elasticjob_cli.log_lines import Line, LogOptions
from elasticjob_operator import model


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
