"""Jobs of a cluster as a source of the dashboard: reads of its API server, and nothing else.

The reads are made with the viewer's credentials, by kubectl or with the viewer's token. Loads
no part of the command line, whose packages the operator's image lacks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from elasticjob_cli.commands.tables import INVALID, Cells
from elasticjob_cli.dashboard.sources import (
    BYTES_PER_PAGE,
    BYTES_PER_POD,
    MAX_LINES,
    MAX_PODS,
    PODS_OF_JOB,
    Details,
    Jobs,
    Json,
    Logs,
    TooLarge,
    Unavailable,
    chosen_pods,
    last_lines,
    object_list,
)
from elasticjob_cli.errors import CommandError
from elasticjob_cli.kubectl import Kubectl, Refused
from elasticjob_cli.log_lines import LogOptions, parsed_lines
from elasticjob_operator.domain.manifests.names import uid_selector
from elasticjob_rendezvous.protocol.records.roster import natural_order
from elasticjob_rendezvous.protocol.text import shortened

API = "/apis/elasticjob.dev/v1alpha1"
MAX_JOBS = 500
"""Maximum number of jobs of a page."""
MAX_LISTED_PODS = 1000
"""Maximum number of pods of a job whose names a page has."""
PAGE = 50
"""Maximum number of objects of one answer of the API server."""
PAGE_SECONDS = 20.0
"""Maximum duration of the reads of a page; the last one may end later."""
READERS = 4
"""Number of logs that are read at a time."""
LONGEST_NAMES = 200

Fetch = Callable[[str, float], bytes]
"""Function that reads a path of the API server for the viewer, within seconds.

Raises `Unavailable`.
"""


class _Reads:
    """Reads of the API server for one page, which end at one deadline."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._due = time.monotonic() + PAGE_SECONDS

    def raw(self, path: str, **query: str) -> bytes:
        """Return the answer to a GET. Raises `Unavailable`."""
        left = self._due - time.monotonic()
        if left <= 0:
            text = f"The cluster did not answer within {PAGE_SECONDS:.0f} s."
            raise Unavailable(HTTPStatus.GATEWAY_TIMEOUT, text)
        return self._fetch(f"{path}?{urlencode(query)}" if query else path, left)

    def parsed(self, path: str, **query: str) -> Json:
        """Return the JSON object of a path. Raises `Unavailable`."""
        try:
            found = json.loads(self.raw(path, **query))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise Unavailable(HTTPStatus.BAD_GATEWAY, "The cluster did not answer with JSON.")
        return found

    def listed(
        self, path: str, keep: Callable[[Json], Json], most: int, **query: str
    ) -> tuple[list[Json], bool]:
        """Return a list's objects, each reduced by `keep`, and True if there are more than `most`.

        The list is read in parts, so that few whole objects are in memory. A part that is too
        large is read again with fewer objects. Raises `Unavailable`.
        """
        found: list[Json] = []
        size, more = PAGE, ""
        while True:
            parameters = query | {"limit": str(min(size, most - len(found)))}
            try:
                part = self.parsed(path, **parameters, **({"continue": more} if more else {}))
            except TooLarge:
                if size == 1:
                    raise
                size = max(1, size // 4)
                continue
            found += map(keep, object_list(part.get("items")))
            token = Cells(part).get(str, "metadata", "continue")
            more = token if token and token != INVALID else ""
            if not more or len(found) >= most:
                return found[:most], bool(more)


class ClusterJobs:
    """Implementation of `Source`: the jobs of a cluster that the viewer may read."""

    title = "a cluster"

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def jobs(self, namespace: str | None) -> Jobs:
        where = f"/namespaces/{namespace}" if namespace else ""
        path = f"{API}{where}/elasticjobs"
        found, more = _Reads(self._fetch).listed(path, _listed_job, MAX_JOBS)
        advice = "" if namespace else ": choose a namespace"
        return Jobs(found, [f"only the first {MAX_JOBS} jobs are shown{advice}"] if more else [])

    def details(self, namespace: str, name: str) -> Details:
        document = _Reads(self._fetch).parsed(_job_path(namespace, name))
        job = Cells(document)
        found = job.get(list, "status", "explanation")
        sentences = [str(one) for one in found] if isinstance(found, list) else []
        return Details(document, object_list(job.get(list, "status", "rounds")), sentences)

    def logs(
        self, namespace: str, name: str, options: LogOptions, document: Json | None = None
    ) -> Logs:
        reads = _Reads(self._fetch)
        most = MAX_PODS if document is None else PODS_OF_JOB
        document = document or reads.parsed(_job_path(namespace, name))
        job = Cells(document)
        selector = uid_selector(job.text("metadata", "uid"))
        here = f"/api/v1/namespaces/{namespace}/pods"
        listed, more = reads.listed(here, _listed_pod, MAX_LISTED_PODS, labelSelector=selector)
        begun = [one["name"] for one in listed if one["phase"] != "Pending"]
        pods = sorted(begun, key=natural_order)
        if options.pod is None and not pods:
            return Logs(pods, [])
        names, note = chosen_pods(pods, options, most)
        rounds = object_list(job.get(list, "status", "rounds"))
        room = min(BYTES_PER_POD, BYTES_PER_PAGE // len(names))
        tail = MAX_LINES if options.rank is not None else options.tail or MAX_LINES

        def end_of(pod: str) -> tuple[Sequence[str], bool]:
            return _log(reads, f"{here}/{pod}/log", trainer_name(document), tail, room)

        with ThreadPoolExecutor(min(READERS, len(names))) as readers:
            ends = dict(zip(names, readers.map(end_of, names), strict=True))
        notes = [note] if note else []
        notes += [f"only {MAX_LISTED_PODS} pods are listed"] if more else []
        cut = [pod for pod, (_, is_cut) in ends.items() if is_cut]
        if cut:
            named = shortened(", ".join(cut), LONGEST_NAMES)
            notes.append(f"earlier lines are left out, as the log is too large: {named}")
        parsed = [parsed_lines(pod, lines) for pod, (lines, _) in ends.items()]
        return Logs(pods, last_lines(parsed, options, rounds), "; ".join(notes))


def _job_path(namespace: str, name: str) -> str:
    return f"{API}/namespaces/{namespace}/elasticjobs/{name}"


def _listed_job(document: Json) -> Json:
    """Return the fields of a job that its row has."""
    job = Cells(document)
    names = ("name", "namespace", "creationTimestamp")
    numbers = ("nodes", "wantedNodes", "restarts")
    last = job.get(int, "status", "rounds", -1, "recoveryMs")
    status = {name: job.get(int, "status", name) for name in numbers}
    status |= {name: job.get(str, "status", name) for name in ("phase", "startTime")}
    status["rendezvous"] = {"round": job.get(int, "status", "rendezvous", "round")}
    status["rounds"] = [{"recoveryMs": last}]
    return {"metadata": {name: job.get(str, "metadata", name) for name in names}, "status": status}


def _listed_pod(document: Json) -> Json:
    pod = Cells(document)
    return {"name": pod.text("metadata", "name"), "phase": pod.text("status", "phase")}


def _log(
    reads: _Reads, path: str, container: str, tail: int, room: int
) -> tuple[Sequence[str], bool]:
    """Return the last lines of a pod's log, and True if lines were left out because of their size.

    The kubelet cuts the newest lines of a tail that is larger than the limit: if an answer has the
    size of the limit, fewer lines are requested.
    """
    query = {"timestamps": "true", "limitBytes": str(room)}
    query |= {"container": container} if container else {}
    lines = tail
    try:
        while True:
            data = reads.raw(path, tailLines=str(lines), **query)
            if len(data) < room or lines <= 1:
                break
            lines = max(1, lines // 4)
    except Unavailable as error:
        if error.status is HTTPStatus.FORBIDDEN:
            raise
        return [f"[elasticjob] no log: {error}"], False  # the pod is gone, or has not started
    text = data.decode(errors="replace").removesuffix("\n")
    return (text.split("\n") if text else []), lines < tail or len(data) >= room


def trainer_name(job: Mapping[str, Any]) -> str:
    """Return the name of the trainer container of a job's document; empty if it is damaged."""
    chosen = Cells(job).get(str, "spec", "trainer")
    first = Cells(job).get(str, "spec", "template", "spec", "containers", 0, "name")
    return str(chosen or first or "")


def by_kubectl(kubectl: Kubectl) -> Fetch:
    """Return a function that reads with the user's kubectl, which has a limit of its own."""

    def fetch(path: str, seconds: float) -> bytes:
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
