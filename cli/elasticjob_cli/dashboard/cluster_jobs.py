"""Jobs of a cluster as a source of the dashboard: reads of its API server, and nothing else.

The reads are made with the viewer's credentials, by kubectl or with the viewer's token. Loads
no part of the command line, whose packages the operator's image lacks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from elasticjob_cli.cluster import Kubectl, Refused
from elasticjob_cli.commands.tables import Cells
from elasticjob_cli.dashboard.sources import (
    BYTES_PER_POD,
    MAX_LINES,
    Details,
    Jobs,
    Json,
    Logs,
    Unavailable,
    chosen_pods,
    last_lines,
    object_list,
)
from elasticjob_cli.errors import CommandError
from elasticjob_cli.log_lines import LogOptions, parsed_lines
from elasticjob_operator.domain.manifests.names import uid_selector
from elasticjob_rendezvous.protocol.records.roster import natural_order

API = "/apis/elasticjob.dev/v1alpha1"
MAX_JOBS = 500
"""Maximum number of jobs of a page."""

Fetch = Callable[[str], bytes]
"""Function that reads a path of the API server for the viewer; raises `Unavailable`."""


class ClusterJobs:
    """Implementation of `Source`: the jobs of a cluster that the viewer may read."""

    title = "a cluster"

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def jobs(self, namespace: str | None) -> Jobs:
        where = f"/namespaces/{namespace}" if namespace else ""
        found = self._read(f"{API}{where}/elasticjobs", limit=str(MAX_JOBS))
        more = Cells(found).get(str, "metadata", "continue")
        cut = [f"only the first {MAX_JOBS} jobs are shown: choose a namespace"] if more else []
        return Jobs(object_list(found.get("items")), cut)

    def details(self, namespace: str, name: str) -> Details:
        document = self._job(namespace, name)
        job = Cells(document)
        said = job.get(list, "status", "explanation")
        sentences = [str(one) for one in said] if isinstance(said, list) else []
        return Details(document, object_list(job.get(list, "status", "rounds")), sentences)

    def logs(self, namespace: str, name: str, options: LogOptions) -> Logs:
        document = self._job(namespace, name)
        job = Cells(document)
        selector = uid_selector(job.text("metadata", "uid"))
        here = f"/api/v1/namespaces/{namespace}/pods"
        found = object_list(self._read(here, labelSelector=selector).get("items"))
        begun = [
            Cells(one).text("metadata", "name")
            for one in found
            if Cells(one).text("status", "phase") != "Pending"
        ]
        pods = sorted(begun, key=natural_order)
        if options.pod is None and not pods:
            return Logs(pods, [])
        names, note = chosen_pods(pods, options)
        rounds = object_list(job.get(list, "status", "rounds"))
        ends = [parsed_lines(pod, self._log(here, pod, document, options)) for pod in names]
        return Logs(pods, last_lines(ends, options, rounds), note)

    def _job(self, namespace: str, name: str) -> Json:
        return self._read(f"{API}/namespaces/{namespace}/elasticjobs/{name}")

    def _log(self, pods: str, pod: str, job: Json, options: LogOptions) -> Sequence[str]:
        tail = MAX_LINES if options.rank is not None else options.tail or MAX_LINES
        query = {"timestamps": "true", "tailLines": str(tail), "limitBytes": str(BYTES_PER_POD)}
        container = trainer_name(job)
        query |= {"container": container} if container else {}
        try:
            said = self._fetch(f"{pods}/{pod}/log?{urlencode(query)}")
        except Unavailable as error:
            if error.status is HTTPStatus.FORBIDDEN:
                raise
            return [f"[elasticjob] no log: {error}"]  # the pod is gone, or has not started
        return said.decode(errors="replace").splitlines()

    def _read(self, path: str, **query: str) -> Json:
        try:
            found = json.loads(self._fetch(f"{path}?{urlencode(query)}" if query else path))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise Unavailable(HTTPStatus.BAD_GATEWAY, "The cluster did not answer with JSON.")
        return found


def trainer_name(job: Mapping[str, Any]) -> str:
    """Return the name of the trainer container of a job's document; empty if it is damaged."""
    chosen = Cells(job).get(str, "spec", "trainer")
    first = Cells(job).get(str, "spec", "template", "spec", "containers", 0, "name")
    return str(chosen or first or "")


def by_kubectl(kubectl: Kubectl) -> Fetch:
    """Return a function that reads with the user's kubectl."""

    def fetch(path: str) -> bytes:
        try:
            return kubectl.call("get", f"--raw={path}").encode()
        except Refused as error:
            raise Unavailable(
                _STATUS.get(error.reason, HTTPStatus.BAD_GATEWAY), str(error)
            ) from error
        except CommandError as error:
            raise Unavailable(HTTPStatus.BAD_GATEWAY, str(error)) from error

    return fetch


_STATUS = {
    "Forbidden": HTTPStatus.FORBIDDEN,
    "NotFound": HTTPStatus.NOT_FOUND,
    "Unauthorized": HTTPStatus.UNAUTHORIZED,
    "BadRequest": HTTPStatus.BAD_REQUEST,
}
"""Status of an answer by the reason that kubectl prints."""
