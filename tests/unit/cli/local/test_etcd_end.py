"""Reason for the end of a local run's etcd, from its log."""

from __future__ import annotations

import json

import pytest

from elasticjob_cli.local.etcd import end_reason

PANIC = json.dumps({"level": "panic", "msg": "failed to create WAL", "error": "no space left"})
NO_THREADS = """\
runtime: failed to create new OS thread (have 4 already; errno=11)
runtime: may need to increase max user processes (ulimit -u)
fatal error: newosproc

runtime stack:
runtime.throw(0x1098fd3, 0x9)
\t/go/src/runtime/panic.go:1117 +0x72
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            f"{PANIC}\ngoroutine 1 [running]:\n\tmain.go:32 +0x45",
            "failed to create WAL: no space left",
        ),
        (
            NO_THREADS,
            "failed to create new OS thread (have 4 already; errno=11); "
            "may need to increase max user processes (ulimit -u)",
        ),
        (f"{NO_THREADS}{PANIC}\n", "failed to create WAL: no space left"),
        ("anything else", ""),
    ],
)
def test_reason_for_the_end_of_etcd_is_above_its_stack_trace(log: str, reason: str) -> None:
    assert end_reason(log) == reason
