"""Verdict and summary of the rendezvous benchmark; forked members with fake handlers."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.backends import Backend
from bench.etcd_proc import count_requests
from bench.rendezvous import Measured, summary
from bench.rendezvous_case import (
    CaseFailed,
    CaseResult,
    Handler,
    Report,
    WrongRendezvous,
    run_case,
    verify,
)

METRICS = """\
# HELP etcd_http_received_total Counter of requests received into the system.
# TYPE etcd_http_received_total counter
etcd_http_received_total{method="GET"} 30
etcd_http_received_total{method="PUT"} 12
etcd_http_successful_total{code="200",method="GET"} 30
grpc_server_msg_received_total{grpc_method="Txn",grpc_type="unary"} 5
grpc_server_msg_received_total{grpc_method="Watch",grpc_service="a",grpc_type="bidi"} 1.5e+01
grpc_server_msg_received_total{grpc_method="Watch",grpc_service="b",grpc_type="bidi"} 0
grpc_server_handled_total{grpc_code="OK",grpc_method="Txn"} 5
process_open_fds 14
"""


def reports(ranks: Sequence[int], worlds: Sequence[int]) -> list[Report]:
    return [Report(rank, world, 0.0, 0.0) for rank, world in zip(ranks, worlds, strict=True)]


def test_count_requests_counts_client_requests_once() -> None:
    assert count_requests(METRICS) == {"GET": 30, "PUT": 12, "Txn": 5, "Watch": 15}


def test_verify_accepts_bijection_in_any_order() -> None:
    verify(reports([2, 0, 1], [3, 3, 3]), 3)


@pytest.mark.parametrize(
    ("ranks", "worlds", "complaint"),
    [
        ([0, 1, 1], [3, 3, 3], "ranks"),
        ([1, 2, 3], [3, 3, 3], "ranks"),
        ([0, 1], [2, 2], "ranks"),
        ([0, 1, 2], [3, 3, 2], "world sizes"),
    ],
)
def test_verify_refuses_invalid_ranks(
    ranks: Sequence[int], worlds: Sequence[int], complaint: str
) -> None:
    with pytest.raises(WrongRendezvous, match=complaint):
        verify(reports(ranks, worlds), 3)


def test_summary_has_ratios_and_own_requests_by_size() -> None:
    def cell(backend: Backend, *walls: float, error: str | None = None) -> Measured:
        return Measured(
            backend, 8, [CaseResult(wall, 1.0, {"Txn": 32, "Watch": 16}) for wall in walls], error
        )

    content = summary(
        {
            (Backend.ELASTICJOB, 8): cell(Backend.ELASTICJOB, 0.2, 0.1, 0.3),
            (Backend.ETCD, 8): cell(Backend.ETCD, 2.0, 3.0, 4.0),
            (Backend.C10D, 8): cell(Backend.C10D, 1.0, error="only 3 of 8 members got through"),
        }
    )
    assert content["ratios"] == {"etcd/8": 15.0, "c10d/8": None}
    assert content["requests_per_member"] == {"8": 6.0}


@dataclass(frozen=True)
class FixedHandler:
    rank: int
    world_size: int

    def next_rendezvous(self) -> FixedHandler:
        return self


def test_members_are_processes_that_return_ranks(tmp_path: Path) -> None:
    result = run_case(5, lambda index: FixedHandler(4 - index, 5), None, 20, tmp_path / "log")
    assert 0 < result.wall_seconds < 20
    assert result.requests is None


def test_requests_are_counted_between_start_and_end(tmp_path: Path) -> None:
    counts = iter([Counter(Txn=7), Counter(Txn=16, Watch=3)])
    result = run_case(
        2, lambda index: FixedHandler(index, 2), lambda: next(counts), 20, tmp_path / "log"
    )
    assert result.requests == {"Txn": 9, "Watch": 3}
    row = Measured(Backend.ETCD, 2, [result]).to_json()
    assert json.loads(json.dumps(row))["requests_per_member"] == 6.0


def test_failed_member_ends_the_case_at_once(tmp_path: Path) -> None:
    def make(index: int) -> Handler:
        if index == 1:
            raise ConnectionError("nobody there")
        os.read(os.pipe()[0], 1)  # as a member that waits for its peers
        raise AssertionError

    with pytest.raises(CaseFailed, match="ConnectionError: nobody there"):
        run_case(3, make, None, 60, tmp_path / "log")


def test_members_without_rendezvous_end_at_the_timeout(tmp_path: Path) -> None:
    def make(index: int) -> Handler:
        if index:
            os.read(os.pipe()[0], 1)
        return FixedHandler(0, 2)

    with pytest.raises(CaseFailed, match="only 1 of 2 members"):
        run_case(2, make, None, 0.5, tmp_path / "log")
