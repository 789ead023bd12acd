"""Output of `get`, in the columns of the CRD."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from elasticjob_cli.commands.tables import (
    age,
    aligned,
    failure_lines,
    header,
    history_lines,
    interruption_line,
    restarts_text,
    row,
)
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.crdgen import definition
from elasticjob_operator.model.status import Condition, FailureStatus, Interruptions, Status
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
    assert row(job, False, NOW) == short
    wide = ("1", "4", "digits-0", "loss", "UserError", "2", "0", "935")
    assert row(job, True, NOW) == (*short, *wide)


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
    assert row(job, True, NOW)[1:4] == ("<none>", "<none>", "<none>")


def test_columns_are_as_wide_as_widest_cell() -> None:
    assert aligned([("A", "B"), ("long", "x")]) == ["A      B", "long   x"]


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
            "firstStepMs": 30,
            "coldNodes": 1,
        }
    ]
    assert " ".join(history_lines(rounds)[1].split()) == "12.3 s 2 loss: a-1 3 3 - - 0 - 20 30 1"


@pytest.mark.parametrize(
    ("charged", "reason", "text"),
    [
        (0, "", "0 of 3"),
        (2, "", "2 of 3"),
        (4, "WorkersFailed", "4, maxRestarts is 3"),
        (3, "WorkersFailed", "3 of 3"),
        (2, "DeadlineExceeded", "2 of 3"),
    ],
    ids=["none", "running", "spent", "no progress", "ended otherwise"],
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
