"""Rules for tests that must hold on a busy machine: CONTRIBUTING.md has them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.paths import ROOT

LEAST_PATIENCE_SECONDS = 30.0
"""Shortest wait for another thread or process."""
LEAST_SLEEP_SECONDS = 0.5
CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time"}
WAITS = {"communicate", "join", "result", "wait"}
LEAST_TRIED_SECONDS = 1.5
"""A shorter wait is one that the test expects to end without a result."""
PARTS = ("unit", "integration", "e2e")
ACCEPTED = {
    ("e2e/test_training.py", "elapsed"): "the grace period of the pod is the limit itself",
    ("integration/agent/test_rdzv_conf.py", "elapsed"): "the next limit of the product is 15 s",
    ("integration/etcd/test_auth.py", "elapsed"): "half a minute, the next limit is a minute",
    ("integration/launcher/test_deadline.py", "elapsed"): "the deadline is the behaviour",
    ("integration/launcher/test_local_runtime.py", "elapsed"): "the next limit is 100 s",
    ("integration/launcher/test_output.py", "elapsed"): "the next limit is 100 s",
    ("integration/launcher/test_preparation.py", "elapsed"): "the next limit is 100 s",
    ("integration/launcher/test_worker_count.py", "elapsed"): "the next limit is longer",
    ("integration/rendezvous/test_protocol.py", "elapsed"): "a wait for a condition, of a minute",
    ("integration/torch/test_etcd_v2_rendezvous.py", "elapsed"): "half of the next limit",
    ("integration/warm_start/test_import_effects.py", "elapsed"): "the next limit is 99 s",
    ("unit/corpus/test_job.py", "elapsed"): "the next limit is minutes",
    ("unit/launcher/processes/test_output.py", "elapsed"): "without the deadline it takes a minute",
    ("unit/launcher/test_nested_launches.py", "elapsed"): "processor time, ten times the usual one",
    ("unit/operator/domain/launch/test_split_properties.py", "elapsed"): "processor time, as well",
    ("integration/launcher/test_node_command.py", "sleep"): "an end that must not come",
    ("integration/launcher/test_process_cleanup.py", "sleep"): "an end that must not come",
    ("unit/train/test_stop_copy.py", "sleep"): "an end that must not come",
}
"""File and kind of what is left, with the reason for which it holds on a busy machine."""


def number(node: ast.AST | None) -> float | None:
    found = node.value if isinstance(node, ast.Constant) else None
    return float(found) if isinstance(found, int | float) else None


def name_of(call: ast.AST) -> str:
    """Return the name of the called method or function; empty if there is none."""
    if not isinstance(call, ast.Call):
        return ""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def is_elapsed_limit(node: ast.AST) -> bool:
    """Return True for `time.monotonic() - began < limit`."""
    if not isinstance(node, ast.Compare) or not isinstance(node.left, ast.BinOp):
        return False
    is_duration = isinstance(node.left.op, ast.Sub) and name_of(node.left.left) in CLOCKS
    return is_duration and any(isinstance(each, ast.Lt | ast.LtE) for each in node.ops)


def is_short_wait(node: ast.AST) -> bool:
    """Return True for a wait that may be too short on a busy machine."""
    if not isinstance(node, ast.Call) or name_of(node) not in WAITS:
        return False
    given = node.args + [each.value for each in node.keywords if each.arg == "timeout"]
    seconds = number(given[0]) if given else None
    return seconds is not None and LEAST_TRIED_SECONDS < seconds < LEAST_PATIENCE_SECONDS


def is_short_sleep(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr):
        return False
    call = node.value.value if isinstance(node.value, ast.Await) else node.value
    if name_of(call) != "sleep" or not isinstance(call, ast.Call) or not call.args:
        return False
    seconds = number(call.args[0])
    return seconds is not None and 0 < seconds < LEAST_SLEEP_SECONDS


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and kind of what depends on the speed of the machine."""
    for node in ast.walk(ast.parse(source)):
        if is_elapsed_limit(node):
            yield node.lineno, "elapsed"  # type: ignore[attr-defined]
        if is_short_wait(node):
            yield node.lineno, "wait"  # type: ignore[attr-defined]
        for part in ("body", "orelse", "finalbody"):
            block = getattr(node, part, None)
            for first, second in pairwise(block) if isinstance(block, list) else ():
                if is_short_sleep(first) and isinstance(second, ast.Assert):
                    yield first.lineno, "sleep"


def modules() -> list[Path]:
    return sorted(path for part in PARTS for path in (ROOT / "tests" / part).rglob("*.py"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("assert time.monotonic() - began < 5", [(1, "elapsed")]),
        ("assert 1 < time.monotonic() - began", []),
        ("assert time.monotonic() - began >= 5", []),
        ("thread.join(10)", [(1, "wait")]),
        ("process.communicate(timeout=20)", [(1, "wait")]),
        ("thread.join(60)", []),
        ("thread.join(0.1)", []),
        ("time.sleep(0.1)\nassert done", [(1, "sleep")]),
        ("async def f():\n    await asyncio.sleep(0.1)\n    assert done", [(2, "sleep")]),
        ("while not done:\n    time.sleep(0.1)\nassert done", []),
    ],
)
def test_dependence_on_the_speed_of_the_machine_is_found(
    source: str, expected: list[tuple[int, str]]
) -> None:
    assert list(findings(source)) == expected


def test_no_test_depends_on_the_speed_of_the_machine_without_a_reason() -> None:
    """Wait for a state for up to a minute, assert an order or a count, or replace the clock."""
    tests = ROOT / "tests"
    found = [
        (str(path.relative_to(tests)), line, kind)
        for path in modules()
        for line, kind in findings(path.read_text())
    ]
    kept = {(name, kind) for name, _, kind in found}
    assert [each for each in found if (each[0], each[2]) not in ACCEPTED] == []
    assert [entry for entry in ACCEPTED if entry not in kept] == [], "entries without a test"
