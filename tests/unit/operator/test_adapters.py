"""Small edge cases of the operator: merge patches, dead watches, probes, metrics, the log."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from http import HTTPStatus
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob_operator.domain.json_object import merge_patch
from elasticjob_operator.domain.status.events import Event, EventType
from elasticjob_operator.kubernetes.client import PODS, Json, Kind
from elasticjob_operator.kubernetes.event_recorder import EventRecorder, Subject
from elasticjob_operator.logs import JsonFormatter, TextFormatter, of_job
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.model.status import Interruptions, RoundStatus, Status, StopStatus
from elasticjob_operator.reconcile.job_memory import JobKey, Jobs
from elasticjob_operator.reconcile.watches import StalenessCheck
from elasticjob_operator.reconcile.workqueue import Retry
from elasticjob_operator.replica.health import Health, serve_health
from tests.integration.etcd_server import Ports
from tests.unit.operator.builders import NOW

_LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
_OBJECTS = st.recursive(
    st.dictionaries(st.sampled_from("abc"), _LEAVES.filter(lambda leaf: leaf is not None)),
    lambda inner: st.dictionaries(
        st.sampled_from("abc"), inner | st.integers() | st.lists(st.integers(), max_size=2)
    ),
    max_leaves=8,
)


def applied(target: Any, patch: dict[str, Any]) -> dict[str, Any]:
    """Apply a merge patch with RFC 7386's own algorithm."""
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = applied(result.get(key), value)
        else:
            result[key] = value
    return result


@given(_OBJECTS, _OBJECTS)
def test_merge_patch_turns_one_document_into_another(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert applied(before, merge_patch(before, after)) == after


@given(_OBJECTS)
def test_unchanged_document_gives_empty_patch(document: dict[str, Any]) -> None:
    assert merge_patch(document, document) == {}


def item(uid: str, version: int) -> dict[str, Any]:
    return {"metadata": {"uid": uid, "resourceVersion": str(version)}}


def test_slow_watch_is_not_dead() -> None:
    staleness = StalenessCheck()
    assert staleness.compare(PODS, [item("a", 5)]) == {"a"}
    staleness.take(PODS, item("a", 5)["metadata"], deleted=False)
    assert staleness.compare(PODS, [item("a", 6)]) == {"a"}
    assert not staleness.dead
    staleness.take(PODS, item("a", 7)["metadata"], deleted=False)
    assert staleness.compare(PODS, [item("a", 7)]) == set()
    assert not staleness.dead


def test_watch_that_misses_an_object_of_two_lists_is_dead() -> None:
    staleness = StalenessCheck()
    staleness.compare(PODS, [item("a", 5)])
    staleness.compare(PODS, [item("a", 5)])
    assert list(staleness.dead) == ["pods"]
    staleness.take(PODS, item("a", 5)["metadata"], deleted=False)
    staleness.compare(PODS, [item("a", 5)])
    assert not staleness.dead


def test_object_deleted_before_its_watch_event_is_no_sign() -> None:
    staleness = StalenessCheck()
    staleness.compare(PODS, [item("a", 5)])
    staleness.compare(PODS, [])
    assert not staleness.dead


def test_object_missing_from_list_without_event_is_found() -> None:
    staleness = StalenessCheck()
    staleness.take(PODS, item("a", 5)["metadata"], deleted=False)
    assert staleness.compare(PODS, []) == {"a"}
    assert staleness.compare(PODS, []) == set()


def posted_notes(message: str) -> list[str]:
    """Return the notes of the events that one event with this message is posted as."""
    posted: list[Json] = []

    class Posting:
        async def create(self, kind: Kind, namespace: str | None, body: Json) -> Json:
            posted.append(body)
            return body

        async def patch(self, kind: Kind, namespace: str | None, name: str, body: Json) -> Json:
            raise AssertionError("there is no series yet")

    async def main() -> None:
        events = EventRecorder(Posting(), "here", lambda: 0.0, lambda: NOW)
        said = Event(EventType.WARNING, "WorkerFailed", message)
        events.record(Subject("ns", "job", "uid", "1"), (said,))
        posting = asyncio.create_task(events.run())
        async with asyncio.timeout(60):
            while not posted and not posting.done():
                await asyncio.sleep(0)
            assert not posting.done()
            await events.finish()
        posting.cancel()

    asyncio.run(main())
    return [body["note"] for body in posted]


def test_event_with_undecodable_text_is_posted() -> None:
    """A record of a job may contain it, and must not end the operator of all jobs."""
    assert posted_notes("no file caf\udce9") == [r"no file caf\udce9"]


def fetch(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_health_probes_report_the_problem() -> None:
    ports = Ports(2)
    probes, scrapes = ports.numbers

    async def main() -> None:
        health, metrics = Health(), Metrics()
        found = ["the watch of pods is dead"]
        health.checks.append(lambda: found[0] if found else "")
        async with serve_health(health, probes, metrics.text, scrapes):
            assert await asyncio.to_thread(fetch, probes, "/healthz") == (
                HTTPStatus.SERVICE_UNAVAILABLE,
                "the watch of pods is dead\n",
            )
            found.clear()
            assert await asyncio.to_thread(fetch, probes, "/healthz") == (200, "ok\n")
            assert (await asyncio.to_thread(fetch, probes, "/readyz"))[0] == 503
            health.ready = True
            assert (await asyncio.to_thread(fetch, probes, "/readyz?verbose"))[0] == 200
            assert (await asyncio.to_thread(fetch, probes, "/metrics"))[0] == 404
            code, text = await asyncio.to_thread(fetch, scrapes, "/metrics")
            assert code == 200
            assert "elasticjob_leader 0.0" in text

    try:
        asyncio.run(main())
    finally:
        ports.close()


def test_round_metrics_have_cause_and_parts() -> None:
    metrics = Metrics()
    metrics.observe_round(
        RoundStatus(round=2, cause="loss", nodes=3, detect_ms=100, join_ms=200, start_ms=700)
    )
    text = metrics.text().decode()
    assert 'elasticjob_rounds_total{cause="loss"} 1.0' in text
    assert 'elasticjob_recovery_seconds_sum{cause="loss",part="total"} 1.0' in text
    assert 'part="stop"' not in text, "what is unknown is not observed"


def test_first_step_metric_is_separate_from_recovery() -> None:
    metrics = Metrics()
    found = RoundStatus(
        round=2, cause="loss", nodes=3, confirm_ms=300, start_ms=700, first_step_ms=4000
    )
    metrics.observe_round(found)
    metrics.observe_first_step(found)
    text = metrics.text().decode()
    assert 'elasticjob_recovery_seconds_sum{cause="loss",part="total"} 1.0' in text
    assert 'elasticjob_recovery_seconds_sum{cause="loss",part="confirm"} 0.3' in text
    assert 'elasticjob_recovery_seconds_sum{cause="loss",part="first_step"} 4.0' in text


def test_total_metric_equals_recovery_in_status() -> None:
    """Training continues until a planned round is decided; without a run there is no recovery."""
    metrics = Metrics()
    joined = RoundStatus(round=2, cause="join", nodes=3, detect_ms=3000, stop_ms=200, start_ms=300)
    metrics.observe_round(joined)
    metrics.observe_round(RoundStatus(round=3, cause="loss", nodes=3, detect_ms=100, join_ms=200))
    text = metrics.text().decode()
    assert 'elasticjob_recovery_seconds_sum{cause="join",part="total"} 0.5' in text
    assert 'elasticjob_recovery_seconds_sum{cause="join",part="detect"} 3.0' in text
    assert 'cause="loss",part="total"' not in text
    assert 'elasticjob_recovery_seconds_sum{cause="loss",part="join"} 0.2' in text


def test_start_metric_counts_warm_and_cold() -> None:
    metrics = Metrics()
    metrics.observe_round(RoundStatus(round=1, cause="start", nodes=3))
    assert "elasticjob_node_starts_total{" not in metrics.text().decode(), "nobody said"
    metrics.observe_round(RoundStatus(round=2, cause="loss", nodes=3, cold_nodes=1))
    metrics.observe_round(RoundStatus(round=3, cause="join", nodes=4, cold_nodes=0))
    text = metrics.text().decode()
    assert 'elasticjob_node_starts_total{start="cold"} 1.0' in text
    assert 'elasticjob_node_starts_total{start="warm"} 6.0' in text


def test_increase_of_status_counts_is_counted() -> None:
    metrics = Metrics()
    first = Status(restarts=1, interruptions=Interruptions(losses=1, joins=2))
    metrics.observe_counts(Status(), first)
    metrics.observe_counts(first, Status(restarts=3, interruptions=Interruptions(losses=2)))
    text = metrics.text().decode()
    assert "elasticjob_restarts_total 3.0" in text
    assert 'elasticjob_interruptions_total{kind="losses"} 2.0' in text
    assert 'elasticjob_interruptions_total{kind="joins"} 2.0' in text
    assert 'kind="preemptions"' not in text


def test_planned_stop_is_counted_once_by_its_result() -> None:
    metrics = Metrics()
    error = "rank 0: /claim: No space left on device"
    stopped = Status(last_stop=StopStatus(reason="Suspended", result="SaveFailed", error=error))
    for before, after in ((Status(), stopped), (stopped, stopped), (stopped, Status())):
        metrics.observe_counts(before, after)
    found = [line for line in metrics.text().decode().splitlines() if "stops_total{" in line]
    assert found == ['elasticjob_stops_total{result="SaveFailed"} 1.0']


def test_job_metric_counts_phases_at_scrape() -> None:
    metrics = Metrics()
    metrics.count_jobs(lambda: ["Running", "Running", "Failed"])
    text = metrics.text().decode()
    assert 'elasticjob_jobs{phase="Running"} 2.0' in text
    assert 'elasticjob_jobs{phase="Pending"} 0.0' in text


def test_goodput_metric_has_one_series_for_each_job_with_snapshots() -> None:
    metrics = Metrics()
    assert "elasticjob_goodput_percent{" not in metrics.text().decode()
    jobs = Jobs(lambda: 0.0, lambda: 0.0)
    for name, goodput in (("a", 97), ("b", None)):
        memory = jobs.recall(JobKey("team", name), name)
        memory.report = replace(memory.report, goodput=goodput)
    metrics.show_goodput(jobs.goodput)
    found = [line for line in metrics.text().decode().splitlines() if "goodput_percent{" in line]
    assert found == ['elasticjob_goodput_percent{job_name="a",job_namespace="team"} 97.0']


def test_error_metric_uses_the_kind_of_the_cause() -> None:
    metrics = Metrics()
    error = RuntimeError("seen from outside")
    error.__cause__ = TimeoutError()
    metrics.count_error(error)
    metrics.count_error(Retry("no pods", kind="QuotaExceeded"))
    text = metrics.text().decode()
    assert 'elasticjob_errors_total{kind="TimeoutError"} 1.0' in text
    assert 'elasticjob_errors_total{kind="QuotaExceeded"} 1.0' in text


@pytest.mark.parametrize(
    ("message", "job", "text"),
    [
        ("gone", "ns/name", "job ns/name: gone"),
        ("job of another: gone", "ns/name", "job ns/name: job of another: gone"),
        ("the sweep could not be finished", None, "the sweep could not be finished"),
    ],
)
def test_json_log_line_starts_with_the_job(message: str, job: str | None, text: str) -> None:
    log = logging.getLogger("elasticjob_operator.reconcile.resync")
    extra = None if job is None else of_job(job)
    record = log.makeRecord(log.name, 30, "", 0, message, (), None, extra=extra)
    line = JsonFormatter().format(record)
    found = json.loads(line)
    assert found.get("job") == job
    assert (found["message"], found["level"], found["source"]) == (
        message,
        "warning",
        "reconcile.resync",
    )
    assert job is None or line.startswith('{"job"')
    assert TextFormatter().format(record).endswith(f"WARNING reconcile.resync {text}")


def test_log_message_is_one_line_of_printable_text() -> None:
    log = logging.getLogger("elasticjob_operator.reconcile")
    try:
        raise ValueError("x\x1b[2J\n2026-01-31T12:00:00.000Z WARNING forged")
    except ValueError:
        told = sys.exc_info()
    said = "member a\x1b[2J\x85\u202e\n2026-01-31T12:00:00.000Z WARNING forged"
    record = log.makeRecord(log.name, 30, "", 0, said, (), told)
    first, *rest = TextFormatter().format(record).split("\n")
    assert first.endswith("member a\\x1b[2J\\x85\\u202e\\n2026-01-31T12:00:00.000Z WARNING forged")
    assert rest[0] == "Traceback (most recent call last):"
    assert all(line.startswith("  ") for line in rest[1:])
    found = json.loads(JsonFormatter().format(record))
    for text in (first, *rest, found["message"], found["exception"]):
        assert not {"\x1b", "\x85", "\u202e"} & set(text)


def test_event_note_is_printable() -> None:
    assert posted_notes("a\x1b[2J\u202e") == [r"a\x1b[2J\u202e"]
