"""`Client`: jobs of this machine or of a cluster."""

from __future__ import annotations

import asyncio

from elasticjob_cli.client.definition import ElasticJob
from elasticjob_cli.client.local_place import LocalPlace
from elasticjob_cli.client.places import Place
from elasticjob_cli.client.submitted import SubmittedJob
from elasticjob_cli.local.job_store import DEFAULT_NAMESPACE


class Client:
    """Access to the jobs of one namespace of this machine.

    Args:
        namespace: namespace of the jobs; `default` by default.
    """

    def __init__(self, *, namespace: str | None = None) -> None:
        self._place: Place = LocalPlace(namespace or DEFAULT_NAMESPACE)

    def submit(self, job: ElasticJob, *, python: str | None = None) -> SubmittedJob:
        """Start a job, and return once it runs. It continues when this process ends.

        Args:
            python: interpreter that replaces `python` in the job; the default is this process's.

        Raises:
            BadInput: the job cannot run, or runs already.
            CommandError: it could not be started.
        """
        self._place.submit(job, python)
        return SubmittedJob(self._place, job.name, job, python)

    async def submit_async(self, job: ElasticJob, *, python: str | None = None) -> SubmittedJob:
        """Start a job as `submit` does, without blocking the event loop."""
        return await asyncio.to_thread(self.submit, job, python=python)

    def job(self, name: str) -> SubmittedJob:
        """Return an existing job, whoever started it. Raises `CommandError`."""
        self._place.read(name)
        return SubmittedJob(self._place, name)

    def jobs(self) -> list[SubmittedJob]:
        """Return all jobs of the namespace, running or ended."""
        return [SubmittedJob(self._place, name) for name in self._place.names()]
