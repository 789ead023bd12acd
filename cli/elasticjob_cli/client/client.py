"""`Client`: jobs of this machine or of a cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

from elasticjob_cli.client.definition import ElasticJob
from elasticjob_cli.client.places import ClusterPlace, LocalPlace, Place
from elasticjob_cli.client.submitted_job import SubmittedJob
from elasticjob_cli.errors import BadInput
from elasticjob_cli.kubectl import Kubectl, selects_cluster
from elasticjob_cli.local.job_store import DEFAULT_NAMESPACE
from elasticjob_cli.settings import is_worker
from elasticjob_rendezvous.protocol.text import echoed


class Client:
    """Access to the jobs of one namespace, of this machine or of a cluster.

    The arguments choose the place as the options of `elasticjob` do: a cluster only with
    `cluster=True`, a context or a kubeconfig, or with ELASTICJOB_PLACE.

    Args:
        namespace: namespace of the jobs; the default is `default`, on a cluster the context's.
        cluster: True for a cluster, False for this machine.
        context: context of the kubeconfig.
        kubeconfig: the kubeconfig file.

    Raises:
        BadInput: an argument is not valid, or two contradict each other.
    """

    def __init__(
        self,
        *,
        namespace: str | None = None,
        cluster: bool | None = None,
        context: str | None = None,
        kubeconfig: str | Path | None = None,
    ) -> None:
        if cluster not in (None, True, False):
            raise BadInput(f"cluster must be True, False or None, not {echoed(cluster)}")
        for name, given in (("namespace", namespace), ("context", context)):
            if given is not None and not isinstance(given, str):
                raise BadInput(f"{name} must be a text, not {echoed(given)}")
        if kubeconfig is not None and not isinstance(kubeconfig, (str, Path)):
            raise BadInput(f"kubeconfig must be the path of a file, not {echoed(kubeconfig)}")
        self._context = context
        self._kubeconfig = None if kubeconfig is None else Path(kubeconfig)
        self._on_cluster = selects_cluster(False, cluster, context, self._kubeconfig)
        self._namespace = namespace
        self._place = self._place_of(namespace)

    def _place_of(self, namespace: str | None) -> Place:
        if self._on_cluster:
            return ClusterPlace(Kubectl(namespace, self._context, self._kubeconfig))
        return LocalPlace(namespace or DEFAULT_NAMESPACE)

    def submit(self, job: ElasticJob, *, python: str | None = None) -> SubmittedJob:
        """Start a job. It continues when this process ends.

        Return once a local job runs; on a cluster, once the job is applied.

        Args:
            python: interpreter that replaces `python` in a local job; the default is this
                process's.

        Raises:
            BadInput: the job cannot run, or runs already.
            CommandError: it could not be started.
        """
        if is_worker():
            raise BadInput(
                "a worker must not submit a job: in a script with a function job, put the "
                'submission below `if __name__ == "__main__"`'
            )
        if not isinstance(job, ElasticJob):
            raise BadInput(
                f"submit takes an ElasticJob, not {echoed(job)}: make one with "
                "ElasticJob.from_command, from_function, from_manifest or from_object"
            )
        if python is not None and not isinstance(python, (str, Path)):
            raise BadInput(f"python must be the path of an interpreter, not {echoed(python)}")
        place = self._place
        if job.namespace is not None:
            if self._namespace not in (None, job.namespace):
                raise BadInput(
                    f'the job names namespace "{job.namespace}", the client "{self._namespace}": '
                    "remove metadata.namespace from the job, or use another client"
                )
            place = self._place_of(job.namespace)
        python = None if python is None else str(python)
        place.submit(job, python)
        return SubmittedJob(place, job.name, job, python)

    async def submit_async(self, job: ElasticJob, *, python: str | None = None) -> SubmittedJob:
        """Start a job as `submit` does, without blocking the event loop."""
        return await asyncio.to_thread(self.submit, job, python=python)

    def job(self, name: str) -> SubmittedJob:
        """Return an existing job, of any origin. Raises `CommandError`."""
        if not isinstance(name, str):
            raise BadInput(f"the name of a job must be a text, not {echoed(name)}")
        self._place.read(name)
        return SubmittedJob(self._place, name)

    def jobs(self) -> list[SubmittedJob]:
        """Return all jobs of the namespace, running or ended."""
        return [SubmittedJob(self._place, name) for name in self._place.names()]
