"""Jobs of a cluster in the dashboard: bounds of the reads, and the end of long logs."""

from __future__ import annotations

import json
import os
import threading
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from elasticjob_cli.dashboard import cluster_jobs as module
from elasticjob_cli.dashboard.cluster_jobs import MAX_JOBS, PAGE, ClusterJobs, by_kubectl
from elasticjob_cli.dashboard.pages import jobs_page
from elasticjob_cli.dashboard.sources import (
    BYTES_PER_PAGE,
    BYTES_PER_POD,
    MAX_PODS,
    PODS_OF_JOB,
    Jobs,
    TooLarge,
    Unavailable,
    last_lines,
)
from elasticjob_cli.kubectl import Kubectl
from elasticjob_cli.log_lines import LogOptions, parsed_lines
from tests.unit.cli.dashboard.test_pages import NOW, document


class Cluster:
    """API server with jobs, the pods of one, and their logs, which are cut as a kubelet does."""

    def __init__(self, jobs: int = 1, logs: dict[str, str] | None = None) -> None:
        self.jobs = [document() for _ in range(jobs)]
        for at, one in enumerate(self.jobs):
            one["metadata"] |= {"name": f"job-{at}", "uid": "1", "annotations": {"x": "y" * 999}}
        self.logs = {} if logs is None else logs
        self.largest = 10**9
        self.paths: list[str] = []
        self.threads: set[int] = set()

    def fetch(self, path: str, seconds: float) -> bytes:
        self.paths.append(path)
        self.threads.add(threading.get_ident())
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        words = parts.path.split("/")
        if words[-1] == "log":
            lines = self.logs[words[-2]].encode().splitlines(keepends=True)
            return b"".join(lines[-int(query["tailLines"]) :])[: int(query["limitBytes"])]
        if words[-1] == "pods":
            names = [{"metadata": {"name": name}} for name in self.logs]
            return self._part(names, query)
        if words[-1] == "elasticjobs":
            return self._part(self.jobs, query)
        return json.dumps(self.jobs[0]).encode()

    def _part(self, items: list[Any], query: dict[str, str]) -> bytes:
        begin = int(query.get("continue", 0))
        end = begin + int(query["limit"])
        more = {"continue": str(end)} if end < len(items) else {}
        answer = json.dumps({"items": items[begin:end], "metadata": more}).encode()
        if len(answer) > self.largest:
            raise TooLarge(HTTPStatus.BAD_GATEWAY, "too large")
        return answer


def lines_of(cluster: Cluster, **options: Any) -> tuple[list[str], str]:
    found = ClusterJobs(cluster.fetch).logs("team", "job-0", LogOptions(**options))
    return [line.text for line in found.lines], found.note


def test_newest_lines_of_a_log_beyond_the_limit_are_shown() -> None:
    log = "".join(f"{at} {'x' * 9000}\n" for at in range(500))
    texts, note = lines_of(Cluster(logs={"demo-0": log}), tail=200)
    assert [text.split()[0] for text in texts] == [str(at) for at in range(488, 500)]
    assert texts[-1].endswith("x" * 9000)
    assert note == "earlier lines are left out, as the log is too large: demo-0"


def test_line_beyond_the_limit_is_cut() -> None:
    texts, note = lines_of(Cluster(logs={"demo-0": "first\n" + "x" * 10**6}), tail=200)
    assert texts == ["x" * BYTES_PER_POD]
    assert "demo-0" in note


def test_log_within_the_limit_is_read_once() -> None:
    cluster = Cluster(logs={"demo-0": "a\rb\x0bc\u2028d\n\ne\n"})
    assert lines_of(cluster, tail=200) == (["a\rb\x0bc\u2028d", "", "e"], "")
    assert len([path for path in cluster.paths if "/log?" in path]) == 1


def test_logs_of_a_page_have_a_maximum_and_are_read_in_parallel() -> None:
    log = "".join(f"{at:019}\n" for at in range(10**5))
    cluster = Cluster(logs={f"demo-{at}": log for at in range(MAX_PODS + 1)})
    texts, note = lines_of(cluster, tail=2000)
    assert note.startswith(f"only the first {MAX_PODS} of {MAX_PODS + 1} pods; earlier lines")
    assert texts[-1] == f"{10**5 - 1:019}"
    room = BYTES_PER_PAGE // MAX_PODS
    assert all(f"limitBytes={room}" in path for path in cluster.paths if "/log?" in path)
    assert threading.get_ident() in cluster.threads
    assert len(cluster.threads) > 1


def test_page_of_a_job_reads_its_object_once_and_fewer_logs() -> None:
    cluster = Cluster(logs={f"demo-{at}": "x\n" for at in range(20)})
    jobs = ClusterJobs(cluster.fetch)
    found = jobs.details("team", "job-0")
    logs = jobs.logs("team", "job-0", LogOptions(tail=40), found.document)
    assert logs.note == f"only the first {PODS_OF_JOB} of 20 pods"
    assert len([path for path in cluster.paths if path.endswith("/job-0")]) == 1
    assert len([path for path in cluster.paths if "/log?" in path]) == PODS_OF_JOB


def test_jobs_are_read_in_parts_of_which_the_fields_of_their_rows_remain() -> None:
    cluster = Cluster(jobs=2 * PAGE + 1)
    found = ClusterJobs(cluster.fetch).jobs(None)
    assert (len(found.documents), found.errors, len(cluster.paths)) == (2 * PAGE + 1, [], 3)
    whole = jobs_page(Jobs(cluster.jobs), "here", None, NOW)
    assert jobs_page(found, "here", None, NOW) == whole
    assert "y" * 999 not in str(found)


def test_part_that_is_too_large_is_read_again_with_fewer_jobs() -> None:
    cluster = Cluster(jobs=PAGE)
    cluster.largest = 40_000
    assert len(ClusterJobs(cluster.fetch).jobs(None).documents) == PAGE
    cluster.largest = 1000
    with pytest.raises(TooLarge):
        ClusterJobs(cluster.fetch).jobs(None)


@pytest.mark.parametrize(("namespace", "advice"), [(None, ": choose a namespace"), ("team", "")])
def test_jobs_beyond_the_maximum_are_reported(namespace: str | None, advice: str) -> None:
    found = ClusterJobs(Cluster(jobs=MAX_JOBS + 1).fetch).jobs(namespace)
    assert len(found.documents) == MAX_JOBS
    assert found.errors == [f"only the first {MAX_JOBS} jobs are shown{advice}"]


def test_pods_beyond_the_maximum_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LISTED_PODS", 3)
    cluster = Cluster(logs={f"demo-{at}": "x\n" for at in range(4)})
    assert lines_of(cluster)[1] == "only 3 pods are listed"


def test_reads_of_a_page_end_at_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_SECONDS", 0.0)
    cluster = Cluster()
    with pytest.raises(Unavailable, match="did not answer within 0 s") as found:
        ClusterJobs(cluster.fetch).jobs(None)
    assert (found.value.status, cluster.paths) == (HTTPStatus.GATEWAY_TIMEOUT, [])


def test_kubectl_passes_a_log_on_unchanged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kubectl").write_text("#!/bin/sh\nprintf '1%%\\r2%%\\r\\n\\377'\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert by_kubectl(Kubectl())("/log", 1.0) == "1%\r2%\r\n\ufffd".encode()


def test_rank_of_thousands_of_digits_is_no_rank() -> None:
    lines = [f"[{'9' * 5000}] x", "[3] y"]
    found = last_lines([parsed_lines("demo-0", lines)], LogOptions(rank=3), [])
    assert [line.text for line in found] == ["[3] y"]
