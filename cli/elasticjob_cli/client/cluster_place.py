"""Jobs of a cluster for the Python client, with the user's kubectl."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from elasticjob_cli.client.definition import ElasticJob
from elasticjob_cli.client.places import Reading
from elasticjob_cli.cluster import Kubectl
from elasticjob_cli.commands import on_cluster
from elasticjob_cli.commands.cluster_logs import cluster_lines
from elasticjob_cli.commands.explain import Cluster
from elasticjob_cli.commands.tables import Cells
from elasticjob_cli.errors import BadInput
from elasticjob_cli.log_lines import Line, LogOptions
from elasticjob_operator import model
from elasticjob_operator.domain.plan.lifecycle import FINISHED

POLL_SECONDS = 2.0


class ClusterPlace:
    """Implementation of `Place`: the jobs of a namespace of a cluster."""

    poll_seconds = POLL_SECONDS

    def __init__(self, kubectl: Kubectl) -> None:
        self._there = Cluster.of(kubectl)

    def submit(self, job: ElasticJob, python: str | None) -> None:
        """Apply the job, as `elasticjob apply` does: an existing job of its name is changed."""
        if python is not None:
            raise BadInput("python must not be given on a cluster: the job's image has it")
        if job.call is not None:
            raise BadInput(
                "a function can run on this machine alone: put it into a script in an image, and "
                "use ElasticJob.from_command"
            )
        on_cluster.applied_text(self._there, job.manifest_text())

    def names(self) -> Sequence[str]:
        return [Cells(one).text("metadata", "name") for one in self._there.jobs(None)]

    def read(self, name: str) -> Reading:
        job = self._there.job(name)
        return Reading(job, job.status.phase in FINISHED)

    def scale(self, name: str, nodes: int) -> int:
        return on_cluster.scaled(self._there, name, nodes)

    def suspend(self, name: str) -> None:
        on_cluster.set_suspended(self._there, name, True)

    def resume(self, name: str, job: ElasticJob | None, python: str | None) -> None:
        on_cluster.set_suspended(self._there, name, False)

    def delete(self, name: str) -> None:
        on_cluster.deletion(self._there, [name]).check()

    def lines(self, name: str, options: LogOptions) -> Iterator[Line]:
        return cluster_lines(self._there, name, options)

    def rounds(self, name: str) -> Sequence[dict[str, Any]]:
        rounds = self._there.job(name).status.rounds
        return [one.model_dump(by_alias=True, mode="json") for one in rounds]

    def return_values(
        self, job: model.ElasticJob, rounds: Sequence[dict[str, Any]]
    ) -> dict[int, Any]:
        return {}

    def explanation(self, name: str) -> tuple[str, ...]:
        return self._there.explain(name).sentences
