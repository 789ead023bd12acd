"""Output of `get`, in the columns of the CRD."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from elasticjob_cli.commands.describe import (
    description,
    failure_lines,
    interruption_line,
    restarts_text,
)
from elasticjob_cli.commands.tables import (
    age,
    aligned,
    clip,
    columns,
    header,
    history_lines,
    row,
    wrapped,
)
from elasticjob_cli.commands.top import COLUMNS
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.crdgen import definition
from elasticjob_operator.model.status import (
    Condition,
    FailureStatus,
    Interruptions,
    MemberStatus,
    RoundStatus,
    Status,
)
from elasticjob_operator.model.types import ConditionStatus, ConditionType
from tests.unit.operator.builders import job

NOW = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (200, "3m20s"),
        (900, "15m"),
        (3600 * 5 + 720, "5h12m"),
        (3600 * 9 + 720, "9h"),
        (3600 * 24 * 3, "3d"),
        (-5, "0s"),
    ],
)
def test_age_format(seconds: int, text: str) -> None:
    assert age(NOW - timedelta(seconds=seconds), NOW) == text


def test_unknown_age() -> None:
    assert age(None, NOW) == "<none>"


@pytest.mark.parametrize("wide", [False, True])
def test_columns_match_kubectl(wide: bool) -> None:
    columns = definition()["spec"]["versions"][0]["additionalPrinterColumns"]
    shown = [c["name"].upper() for c in columns if wide or not c.get("priority")]
    assert list(header(wide)) == ["NAME", *shown]


def test_row_of_a_job() -> None:
    job = ElasticJob.model_validate(
        {
            "apiVersion": "elasticjob.dev/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": "digits", "creationTimestamp": "2026-01-31T11:59:00Z"},
            "spec": {
                "minNodes": 1,
                "maxNodes": 4,
                "template": {"spec": {"containers": [{"name": "c", "command": ["true"]}]}},
            },
            "status": {
                "phase": "Running",
                "nodes": 3,
                "wantedNodes": 4,
                "restarts": 1,
                "rendezvous": {
                    "state": "final",
                    "round": 7,
                    "master": "digits-0",
                    "cause": {"kind": "loss"},
                },
                "rounds": [
                    {"round": 6, "cause": "start", "nodes": 3},
                    {"round": 7, "cause": "loss", "nodes": 3, "recoveryMs": 935},
                ],
                "interruptions": {"losses": 2, "joins": 1},
                "firstFailure": {"round": 2, "pod": "digits-1", "class": "UserError"},
            },
        }
    )
    short = ("digits", "Running", "final", "7", "3", "4", "1", "60s")
    assert row(job.manifest(), False, NOW) == short
    wide = ("1", "4", "digits-0", "loss", "UserError", "2", "0", "935")
    assert row(job.manifest(), True, NOW) == (*short, *wide)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ({}, "none"),
        ({"losses": 1, "preemptions": 2}, "1 loss, 2 preemptions"),
        ({"leaves": 2, "joins": 1, "others": 1}, "2 leaves, 1 join, 1 other"),
    ],
)
def test_interruption_counts_in_words(counts: dict[str, int], said: str) -> None:
    assert interruption_line(Interruptions(**counts)) == said


def test_job_without_status() -> None:
    job = ElasticJob.model_validate(
        {
            "apiVersion": "elasticjob.dev/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": "new"},
            "spec": {"maxNodes": 1, "template": {"spec": {"containers": [{"name": "c"}]}}},
        }
    )
    assert row(job.manifest(), True, NOW)[1:4] == ("<none>", "<none>", "<none>")


def test_columns_are_as_wide_as_widest_cell() -> None:
    assert aligned([("A", "B"), ("long", "x")]) == ["A      B", "long   x"]


LONG = "x" * 40 + "-" + "y" * 20 + "-9"
HUGE = 2**31 - 1


def huge_job(**metadata: str) -> dict[str, Any]:
    """Return a job with the longest names and numbers."""
    cause = {"kind": "membersLost", "members": [LONG] * 10}
    return {
        "metadata": {"name": LONG, "namespace": "n" * 63, **metadata},
        "spec": {"minNodes": HUGE, "maxNodes": HUGE},
        "status": {
            "phase": "Interrupted", "nodes": HUGE, "wantedNodes": HUGE, "restarts": HUGE,
            "startTime": "2025-01-31T12:00:00Z", "lastFailure": {"class": "HostOutOfMemory"},
            "rendezvous": {"state": "joinable", "round": HUGE, "master": LONG, "cause": cause},
        },
    }  # fmt: skip


def test_table_of_jobs_fits_80_columns() -> None:
    job = huge_job()
    lines = aligned([header(False), row(job, False, NOW)], 80)
    assert max(map(len, lines)) <= 80
    name, *others = lines[1].split()
    assert (name[:4], name[-2:]) == ("xxxx", "-9"), "the beginning and the index remain"
    assert "…" in name
    assert others == list(row(job, False, NOW)[1:]), "no other cell is cut"
    wide = aligned([header(True), row(job, True, NOW)])
    assert LONG in wide[1]


def test_table_of_namespaces_fits_80_columns() -> None:
    job = huge_job()
    job["status"] |= {"nodes": 16384, "wantedNodes": 16384}
    job["status"]["rendezvous"] |= {"round": 10**6}
    lines = aligned([header(False, True), row(job, False, NOW, True)], 80)
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[:3] == ["NAMESPACE", "NAME", "PHASE"]


def test_table_of_rounds_fits_80_columns() -> None:
    item = {
        "round": HUGE, "cause": "membersLost", "members": [LONG] * 10, "nodes": 16384,
        "finalSeconds": 99999.9, "recoveryMs": HUGE, "firstStepMs": HUGE, "coldNodes": 16384,
    }  # fmt: skip
    lines = history_lines([item], width=80)
    assert max(map(len, lines)) <= 80
    assert lines[1].count(str(HUGE)) == 3
    assert LONG in history_lines([item], wide=True, width=80)[1]


@pytest.mark.parametrize("width", [60, 80])
def test_tables_of_a_narrow_terminal_leave_out_columns_before_they_wrap(width: int) -> None:
    job = huge_job()
    job["status"] |= {"nodes": 16384, "wantedNodes": 16384, "restarts": 100}
    job["status"]["rendezvous"] |= {"round": 10**6}
    item = {
        "round": 10**6, "cause": "loss", "members": [LONG], "nodes": 16384, "finalSeconds": 99999.9,
        "recoveryMs": HUGE, "firstStepMs": HUGE, "coldNodes": 16384,
    }  # fmt: skip
    running = (LONG, "Running", "512/512", "4096", "1234567", "9.99", "1000", "999999", "100")
    for lines in (
        aligned([header(False), row(job, False, NOW)], width),
        aligned([header(False, True), row(job, False, NOW, True)], width),
        aligned([COLUMNS, running], width),
        history_lines([item], width=width),
    ):
        assert max(map(len, lines)) <= width, lines
        assert {"NAME", "CAUSE"} & set(lines[0].split())
        assert {"PHASE", "NODES"} & set(lines[0].split())


def test_wide_characters_take_two_columns() -> None:
    assert columns("学習率") == 6
    assert columns("e\u0301") == 1
    assert aligned([("A", "B"), ("学習", "x"), ("abc", "y")]) == [
        "A      B",
        "学習   x",
        "abc    y",
    ]
    assert clip("学習率の名前-12", 10) == "学習…前-12"
    for width in (12, 13, 40):
        lines = wrapped("  " + "学習 率の名前 " * 12, width, indent=4)
        assert max(map(columns, lines)) <= width
        assert "".join("".join(lines).split()) == "学習率の名前" * 12


def test_word_longer_than_a_line_is_broken() -> None:
    lines = wrapped("x" * 50 + " end", 20, indent=2)
    assert max(map(len, lines)) <= 20
    assert "".join("".join(lines).split()) == "x" * 50 + "end"


def test_short_table_keeps_its_gaps() -> None:
    assert aligned([("NAME", "B"), ("long", "x")], 80) == ["NAME   B", "long   x"]
    assert aligned([("NAME", "B"), ("long", "x")], 6) == ["NAME B", "long x"]


def test_description_fits_80_columns() -> None:
    members = [
        MemberStatus(pod=LONG, rank=10**6, state="running", round=HUGE, start="cold",
                     cold_reason="the command changed", step=10**13, checkpoint_step=10**13)
    ]  # fmt: skip
    rounds = [
        RoundStatus(round=HUGE, cause="membersLost", members=[LONG], nodes=9999, recovery_ms=HUGE)
    ]
    found = job(status=Status(members=members, rounds=rounds))
    lines = description(found, "here", "/logs", ["word " * 60], width=80)
    tables = lines[lines.index("Members:") :]
    assert max(map(len, tables)) <= 80
    explained = [line for text in lines for line in wrapped(text, 80, 4)]
    assert max(map(len, explained)) <= 80
    assert " ".join(" ".join(explained).split()).count("word") == 60
    assert str(10**13) in "".join(tables)


@pytest.mark.parametrize("damaged", [[], 7, True, {"a": 1}, None])
@pytest.mark.parametrize("field", ["nodes", "phase", "rendezvous", "rounds", "lastFailure"])
def test_damaged_field_is_one_invalid_cell(field: str, damaged: object) -> None:
    document = huge_job()
    whole = row(document, True, NOW)
    document["status"][field] = damaged
    cells = row(document, True, NOW)
    assert len(cells) == len(whole)
    assert cells[0] == LONG
    document["status"] = damaged
    assert row(document, True, NOW)[0] == LONG


def test_wrapped_text_loses_no_word() -> None:
    text = "  Event: " + " ".join(map(str, range(60)))
    lines = wrapped(text, 40, indent=4)
    assert max(map(len, lines)) <= 40
    assert " ".join(lines).split() == text.split()
    assert (lines[0][:3], lines[1][:5]) == ("  E", "    " + lines[1][4])
    assert wrapped(text, None) == [text]


def test_rounds_with_causes_and_times() -> None:
    rounds = [
        {
            "round": 2,
            "cause": "loss",
            "members": ["a-1"],
            "nodes": 3,
            "finalSeconds": 12.345,
            "detectMs": 3,
            "stopMs": None,
            "joinMs": 0,
            "startMs": 20,
            "recoveryMs": 55,
            "firstStepMs": 30,
            "coldNodes": 1,
            "lostSteps": 4,
        }
    ]
    assert " ".join(history_lines(rounds)[1].split()) == "12.3 s 2 loss: a-1 3 55 30 1"
    wide = "12.3 s 2 loss: a-1 3 3 - - 0 - 20 55 30 1 4"
    assert " ".join(history_lines(rounds, wide=True)[1].split()) == wide


@pytest.mark.parametrize(
    ("charged", "reason", "text"),
    [
        (0, "", "0 of 3"),
        (2, "", "2 of 3"),
        (4, "WorkersFailed", "3 of 3, then one failure more"),
        (5, "WorkersFailed", "5, maxRestarts is 3"),
        (3, "WorkersFailed", "3 of 3"),
        (2, "DeadlineExceeded", "2 of 3"),
    ],
    ids=["none", "running", "spent", "lowered", "no progress", "ended otherwise"],
)
def test_restarts_are_charged_failures(charged: int, reason: str, text: str) -> None:
    failed = Condition(
        type=ConditionType.FAILED,
        status=ConditionStatus.TRUE,
        reason=reason,
        last_transition_time=NOW,
    )
    status = Status(restarts=charged, conditions=[failed] if reason else [])
    assert restarts_text(job(status=status, maxRestarts=3)) == text


def test_lost_node_has_neither_rank_nor_exit() -> None:
    failure = FailureStatus(round=2, pod="a-1", class_="NodeLost")
    assert failure_lines(failure) == ["a-1, round 2: NodeLost"]


def test_multiline_message_gives_multiple_lines() -> None:
    """Every line of a message gets the common indentation."""
    failure = FailureStatus(round=2, pod="a-1", class_="UserError", message="ValueError: x\nmore\n")
    assert failure_lines(failure)[1:] == ["ValueError: x", "more"]


def test_failure_names_first_failed_worker() -> None:
    failure = FailureStatus(
        round=2, pod="a-1", rank=3, exit_code=1, class_="UserError", message="ValueError: x",
        traceback="Traceback\n  line\n",
    )  # fmt: skip
    assert failure_lines(failure) == [
        "rank 3 on a-1, round 2: exit code 1, UserError",
        "ValueError: x",
        "Traceback",
        "  line",
    ]
