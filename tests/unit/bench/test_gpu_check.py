"""GPU check: its cases, and the evaluation of steps and status."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.gpu.__main__ import main
from bench.gpu.checks import (
    ALONE,
    Case,
    Fault,
    Result,
    System,
    cases,
    gangs,
    judged,
    lost,
    recovered_at,
    report,
)


def line(at: float, number: int, world: int, step: int = 0) -> dict[str, Any]:
    return {"time": at, "round": number, "world": world, "step": step}


@pytest.mark.parametrize(
    ("devices", "backend", "expected"),
    [
        (0, "", [("gloo", 2)]),
        (1, "", [("nccl", 1), ("gloo", 2)]),
        (1, "nccl", [("nccl", 1)]),
        (2, "", [("nccl", 2)]),
        (8, "", [("nccl", 4)]),
        (8, "gloo", [("gloo", 2)]),
    ],
)
def test_gangs_have_one_nccl_rank_on_each_device(
    devices: int, backend: str, expected: list[tuple[str, int]]
) -> None:
    assert gangs(devices, backend) == expected


def test_gang_of_one_rank_neither_joins_nor_restores_snapshots_of_a_killed_node() -> None:
    chosen = cases([("nccl", 1)])
    assert not [case for case in chosen if case.fault is Fault.JOIN]
    assert [case.fault for case in chosen if case.snapshots] == [Fault.KILL_WORKER]
    assert all(case.causes == ALONE for case in chosen)


def test_cases_of_several_ranks_cover_each_fault_warm_and_cold_and_each_variant() -> None:
    chosen = cases([("nccl", 4)])
    ours = [case for case in chosen if case.system is System.OURS and not case.model]
    assert {(case.fault, case.warm) for case in ours} == {
        (fault, warm) for fault in Fault for warm in (True, False)
    }
    assert [str(case) for case in chosen if case not in ours] == [
        "elasticjob kill-worker nccl 4 ranks warm snapshots",
        "elasticjob kill-node nccl 4 ranks warm snapshots",
        "elasticjob kill-worker nccl 4 ranks warm compiled",
        "torchrun kill-worker nccl 4 ranks cold",
    ]


def test_selected_faults_limit_the_cases() -> None:
    assert {case.fault for case in cases([("gloo", 2)], [Fault.DRAIN])} == {Fault.DRAIN}


def test_check_without_a_case_does_not_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "gpu"
    options = f"--device cpu --faults drain --variants snapshots --output {output}"
    monkeypatch.setattr("sys.argv", ["gpu-check", *options.split()])
    assert main() == 2
    told = capsys.readouterr()
    assert "the options leave no case for 0 devices: name more --faults" in told.err
    assert told.out == ""
    assert not output.exists()


def test_recovery_is_the_first_complete_round_after_the_fault() -> None:
    steps = {
        0: [line(1, 1, 2), line(5, 2, 1), line(9, 3, 2), line(10, 3, 2)],
        1: [line(1, 1, 2), line(9.5, 3, 2)],
    }
    assert recovered_at(steps, 2, 1) == 5, "a round of one rank is complete"
    assert recovered_at(steps, 2, 1, ranks=2) == 9.5, "the slower rank counts"
    assert recovered_at(steps, 6, 2, ranks=1) is None
    assert recovered_at({0: [line(9, 3, 2)]}, 2, 1) is None, "rank 1 has no step"
    assert recovered_at({0: [line(1, 2, 1)]}, 2, 1) is None, "a step before the fault"


@pytest.mark.parametrize(("first", "expected"), [(8, 0), (7, 1), (0, 8), (9, 0)])
def test_lost_steps_are_those_that_a_later_round_repeats(first: int, expected: int) -> None:
    steps = {
        0: [line(1, 1, 2, 6), line(2, 1, 2, 7), line(5, 2, 1, first), line(6, 2, 1, first + 1)],
        1: [line(1, 1, 2, 6)],
    }
    assert lost(steps, 1) == expected


@pytest.mark.parametrize(
    ("fault", "cause", "failure", "steps_lost", "error"),
    [
        (Fault.KILL_WORKER, "failure", "", None, ""),
        (Fault.KILL_WORKER, "loss", "", None, "cause loss; expected: failure"),
        (Fault.KILL_NODE, "loss", "", 2, ""),
        (Fault.KILL_NODE, "loss", "", 3, "3 steps were repeated"),
        (Fault.OUT_OF_MEMORY, "failure", "CUDA out of memory", None, ""),
        (Fault.OUT_OF_MEMORY, "failure", "killed", None, "does not name the memory: killed"),
        (Fault.DRAIN, "", "", None, "cause none; expected: leave"),
    ],
)
def test_result_has_an_error_if_status_or_steps_do_not_match_the_fault(
    fault: Fault, cause: str, failure: str, steps_lost: int | None, error: str
) -> None:
    status = {"cause": cause, "coldReason": "because", "stopMs": 12, "joinMs": None, "nodes": 2}
    result = judged(Case(fault, "nccl", 2), 1.0, 2.0, status, failure, steps_lost)
    assert error in result.error
    assert bool(result.error) == bool(error)
    assert (result.cold_reason, result.times) == ("because", {"stopMs": 12})


def test_report_has_a_row_for_each_case_with_reason_and_lost_steps() -> None:
    case = Case(Fault.KILL_WORKER, "nccl", 2, snapshots=True)
    passed = Result(case, 1.234, 2.5, "failure", "waited 3 s", steps_lost=1)
    failed = Result(Case(Fault.ABORT, "gloo", 2, warm=False), error="a | b\nc")
    text = report([passed, failed], {"device": "X"})
    assert "- device: X\n" in text
    assert (
        "| elasticjob | kill-worker | nccl | 2 | cold: waited 3 s | snapshots | 1.23 | 2.50 | 1"
        " | failure | passed |"
    ) in text
    assert "| elasticjob | abort | gloo | 2 | cold |  | - | - | - |  | a \\| b c |" in text
