"""Status from any records below a job's prefix and any answers of its agents: bounded, valid."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elasticjob_operator.domain.manifests.owned_objects import Access
from elasticjob_operator.domain.manifests.pod import PodSettings, pod
from elasticjob_operator.domain.observed.agent_records import agent_view
from elasticjob_operator.domain.observed.etcd_records import (
    Records,
    decode_records,
    merge_reports,
    rendezvous_view,
)
from elasticjob_operator.domain.observed.state import Obstacle, Refusal, RendezvousView
from elasticjob_operator.domain.plan.planner import plan
from elasticjob_operator.domain.status.next_status import next_status
from elasticjob_operator.model import crdgen
from elasticjob_operator.model.status import Status
from elasticjob_rendezvous.protocol.kv import KeyValue
from elasticjob_rendezvous.protocol.records.agent_reports import read
from elasticjob_rendezvous.protocol.records.codec import MalformedRecord
from elasticjob_rendezvous.protocol.records.failures import Failure
from elasticjob_rendezvous.protocol.records.keys import Keys, job_prefix
from elasticjob_rendezvous.protocol.records.members import Done, Member, Round
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.records.timings import History
from tests.unit.operator.builders import NOW, job, observed, running
from tests.unit.rendezvous.protocol.records.any_records import any_document

KEYS = Keys(job_prefix("team", "job-uid", 1))
MOST_BYTES = 512 * 1024
"""Size below which every status stays, as docs/security.md says."""
NAMES = st.sampled_from(["job-0-uid", "m", "j-" + "9" * 5000, "²", "x" * 5000])
NUMBERS = st.sampled_from(["1", "2", "9" * 5000, "²", "-1"])


class Found(list[tuple[str, Any]]):
    """Keys and JSON values; its text is short, as hypothesis builds it for each example."""

    def __repr__(self) -> str:
        return "".join(f"{key:.80}: {value!r:.2000}\n" for key, value in self)


def under(folder: str, name: st.SearchStrategy[str], kind: Any) -> st.SearchStrategy[Any]:
    return st.tuples(name.map(lambda one: folder + one), any_document(kind))


def pairs() -> st.SearchStrategy[Found]:
    """Return a strategy for keys and JSON values of every kind of record."""
    sessions = NAMES.map(lambda one: f"{KEYS.members}{one}/s")
    per_round = st.tuples(NUMBERS, NAMES).map("/".join)
    return st.tuples(
        st.tuples(st.just(KEYS.round), any_document(Round)),
        st.tuples(st.just(KEYS.bounds), any_document(RendezvousParams)),
        st.lists(under("", sessions, Member), max_size=3),
        st.lists(under(f"{KEYS.prefix}roster/", NUMBERS, Roster), max_size=2),
        st.lists(under(f"{KEYS.prefix}history/", NUMBERS, History), max_size=2),
        st.lists(under(f"{KEYS.prefix}failures/", per_round, Failure), max_size=2),
        st.lists(under(f"{KEYS.prefix}done/", per_round, Done), max_size=2),
    ).map(_flat)


def _flat(found: Any) -> Found:
    return Found([*found[:2], *(pair for some in found[2:] for pair in some)])


def stored(found: Found) -> tuple[KeyValue, ...]:
    return tuple(
        KeyValue(key, text_of(value).encode(errors="replace"), at, at)
        for at, (key, value) in enumerate(found, 1)
    )


def text_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def status_of(view: RendezvousView, before: Status | None = None) -> Status:
    """Return the status of a job with two pods and this rendezvous; plan for it as well."""
    subject = job(before, minNodes=1, maxNodes=2)
    seen = observed(*running(2), view=view)
    plan(subject, seen, NOW)
    return next_status(subject, seen, view, NOW)


SCHEMA: Any = crdgen.structural_schema()["properties"]


def check(value: Any, schema: Any, path: str) -> None:
    """Fail if the API server would refuse a number of the status."""
    if isinstance(value, dict):
        for name, item in value.items():
            check(item, schema["properties"][name], f"{path}.{name}")
    elif isinstance(value, list):
        for item in value:
            check(item, schema["items"], path)
    elif isinstance(value, int) and not isinstance(value, bool):
        bits = {"int32": 31, "int64": 63}[schema["format"]]
        assert -(2**bits) <= value < 2**bits, path


def check_status(status: Status) -> None:
    document = json.loads(status.model_dump_json(by_alias=True, exclude_none=True))
    check(document, SCHEMA["status"], "status")
    assert len(text_of(document).encode()) <= MOST_BYTES
    Status.model_validate(document)


SLOW = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@SLOW
@given(pairs(), pairs())
def test_status_of_any_records_is_bounded_and_valid(first: Any, second: Any) -> None:
    status = status_of(rendezvous_view(decode_records(KEYS.prefix, stored(first))))
    check_status(status)
    again = rendezvous_view(decode_records(KEYS.prefix, stored(second)))
    check_status(status_of(again, status))


@pytest.mark.parametrize("obstacle", Obstacle)
def test_status_with_a_long_refusal_is_bounded(obstacle: Obstacle) -> None:
    """The API server repeats an invalid value of any length, and a webhook may answer anything."""
    refusal = Refusal.after(None, obstacle, "Invalid value: \x1b" + "ü" * 400_000, NOW)
    subject, seen = job(minNodes=1, maxNodes=2), observed(refusal=refusal)
    status = next_status(subject, seen, seen.rendezvous, NOW)
    check_status(status)
    assert status.refusal is not None
    assert status.refusal.message.startswith("Invalid value: \\x1b")
    assert "400019 characters" in status.refusal.message


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", *(f"--{name}={'x' * 131_000}" for name in ("nnodes", "rdzv-id")), "t.py"],
        ["bash", f"/{'x' * 131_000}.sh"],
    ],
    ids=["options of torchrun", "script"],
)
def test_status_and_pod_of_a_command_with_long_words_are_bounded(command: list[str]) -> None:
    container = {"name": "trainer", "image": "trainer:1", "command": command}
    subject, seen = job(template={"spec": {"containers": [container]}}), observed(*running(2))
    status = next_status(subject, seen, seen.rendezvous, NOW)
    assert status.launch is not None
    assert len(status.launch.message) < 2000
    made = pod(subject, 0, 1, PodSettings("sidecar"), Access(b"key", None, None, None))
    assert len(text_of(made["metadata"]["annotations"])) < 4000


@SLOW
@given(st.lists(pairs(), min_size=1, max_size=2), st.one_of(st.text(), st.none(), st.integers()))
def test_status_of_any_answers_of_agents_is_bounded_and_valid(told: Any, state: Any) -> None:
    answers = []
    for member, found in zip(("job-0-uid", "m"), told, strict=False):
        records = [{"key": key.removeprefix(KEYS.prefix), "value": value} for key, value in found]
        document = {"backend": "c10d", "member": member, "state": state, "records": records}
        try:
            answers.append(read(text_of(document).encode(errors="replace")))
        except MalformedRecord:
            continue
    merged: Records = merge_reports(KEYS.prefix, answers, {"job-0-uid", "m"})
    subject = job(minNodes=1, maxNodes=2)
    check_status(status_of(agent_view(subject, running(2), merged, NOW)))
