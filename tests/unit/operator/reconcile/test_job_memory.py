"""In-memory state of a job: one writer for each of its values."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import elasticjob_operator
from elasticjob_operator.reconcile.job_memory import JobMemory, PendingChange

OPERATOR = Path(elasticjob_operator.__file__).parent
WRITERS = {
    "pods": {"reconcile/live_pods.py"},
    "rendezvous": {
        *("rendezvous/agents_source.py", "rendezvous/etcd_source.py", "rendezvous/sources.py"),
    },
    "owned": {"reconcile/owned_objects.py"},
    "report": {"reconcile/reconciler.py"},
    "refusal": {"reconcile/reconciler.py"},
    "deleted_at": {"reconcile/reconciler.py"},
    "sent": {"reconcile/status_writer.py"},
    "nodes_refusal": {"reconcile/plan_pass.py"},
    "withdrawn": {"reconcile/kube_cluster.py"},
    "undeletable": {"reconcile/plan_pass.py"},
    "faults": {"reconcile/fault_guard.py"},
}
NEVER_REPLACED = {"key", "uid", "seen_at", "change"}


def assignments(tree: ast.AST) -> Iterator[str]:
    """Return the assigned attributes of every name or attribute `memory`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = node.value
            name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", "")
            if name == "memory":
                yield node.attr


def test_each_value_of_a_job_is_written_by_its_writer_alone() -> None:
    found: dict[str, set[str]] = {}
    for path in OPERATOR.rglob("*.py"):
        for name in assignments(ast.parse(path.read_text())):
            found.setdefault(name, set()).add(path.relative_to(OPERATOR).as_posix())
    assert found == WRITERS
    assert {one.name for one in fields(JobMemory)} == WRITERS.keys() | NEVER_REPLACED


def test_oldest_pending_change_counts() -> None:
    change = PendingChange()
    change.note(1.0)
    change.note(2.0)
    assert change.take() == 1.0
    assert change.take() is None


def test_change_of_an_unwritten_status_stays_pending() -> None:
    change = PendingChange()
    change.note(1.0)
    taken = change.take()
    change.note(2.0)
    change.restore(taken)
    assert change.at == 1.0


def test_unwritten_status_without_a_change_keeps_a_newer_one() -> None:
    change = PendingChange()
    taken = change.take()
    change.note(2.0)
    change.restore(taken)
    assert change.at == 2.0
