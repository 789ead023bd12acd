"""Output of `elasticjob run`, line by line and as a picture."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from elasticjob_cli.local.display import (
    LiveView,
    NodeRow,
    PlainView,
    Snapshot,
    chosen_nodes,
    render,
)
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.status import Condition
from elasticjob_operator.model.types import ConditionStatus, ConditionType

NODES = (NodeRow("j-0", "0", "running", 2), NodeRow("j-1", "", "starting", 0))


def snapshot(seconds: float, progress: dict[str, Any] | None = None, **rendezvous: Any) -> Snapshot:
    status = {"phase": "Running", "restarts": rendezvous.pop("restarts", 0)}
    job = ElasticJob.model_validate(
        {
            "apiVersion": "elasticjob.dev/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": "j"},
            "spec": {"maxNodes": 2, "template": {"spec": {"containers": [{"name": "c"}]}}},
            "status": {**status, "rendezvous": rendezvous},
        }
    )
    return Snapshot(job, seconds, NODES, progress or {})


FINAL: dict[str, Any] = {
    "state": "final",
    "round": 2,
    "nodes": 2,
    "worldSize": 4,
    "master": "j-0",
    "cause": {"kind": "loss", "members": ["j-1"], "detail": "it is [bold]gone[/]"},
}


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200, force_terminal=False)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_each_transition_prints_one_line(console: Console) -> None:
    view = PlainView(console)
    view.show(snapshot(1, state="joinable", round=0))
    for seconds in (2.0, 2.5, 3.0):
        view.show(snapshot(seconds, **FINAL))
    view.show(snapshot(4, restarts=1, **FINAL))
    view.note(5, "pod j-1 ended: signal 9")
    said = "round 2 final: 2 nodes, 4 workers, master j-0  (loss: j-1 (it is [bold]gone[/]))"
    assert printed(console).splitlines() == [
        "[   1.00 s] Running, no round yet",
        f"[   2.00 s] Running, {said}",
        f"[   4.00 s] Running, {said}, restarts 1",
        "[   5.00 s] pod j-1 ended: signal 9",
    ]


def test_single_node_and_worker_are_in_the_singular(console: Console) -> None:
    PlainView(console).show(snapshot(1, **{**FINAL, "nodes": 1, "worldSize": 1}))
    assert "round 2 final: 1 node, 1 worker, master j-0" in printed(console)


def test_progress_is_printed_periodically(console: Console) -> None:
    view = PlainView(console)
    for seconds in (1, 5, 6, 9, 10.5):
        view.show(snapshot(seconds, {"step": int(seconds)}, **FINAL))
    lines = [line for line in printed(console).splitlines() if "step" in line]
    assert lines == ["[   5.00 s] step 5", "[  10.50 s] step 10"]


def test_round_without_progress_prints_no_progress_line(console: Console) -> None:
    view = PlainView(console)
    view.show(snapshot(6, {"step": 5}, **FINAL))
    view.show(snapshot(12, {}, **FINAL))
    view.show(snapshot(18, {"step": 5}, **FINAL))
    assert [line[12:] for line in printed(console).splitlines()[1:]] == ["step 5"]


def test_live_view_shows_nodes_ranks_state_cause_and_progress() -> None:
    console = Console(
        file=io.StringIO(), width=60, height=30, force_terminal=True, color_system=None
    )
    view = LiveView(console)
    view.show(snapshot(3, {"step": 7, "loss": 0.5}, restarts=1, **FINAL))
    view.note(4, "x" * 500)  # a long line is cut, or the picture could not be redrawn
    view.close()
    last = printed(console)[-1200:]
    for part in (
        "j-0    0",
        "starting",
        "cause: loss: j-1",
        "step 7  loss 0.5",
        "restarts 1/3",
        "…",
    ):
        assert part in last
    bare = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed(console))
    assert all(len(line) <= 60 for line in bare.replace("\r", "\n").split("\n"))


def in_trouble(seconds: float, status: str, reason: str, message: str) -> Snapshot:
    here = snapshot(seconds, **FINAL)
    condition = Condition(
        type=ConditionType.RENDEZVOUS_UNAVAILABLE,
        status=ConditionStatus(status),
        reason=reason,
        message=message,
        last_transition_time=datetime(2026, 1, 31, tzinfo=UTC),
    )
    told = here.job.status.model_copy(update={"conditions": [condition]})
    return replace(here, job=here.job.model_copy(update={"status": told}))


FULL = "etcd at 127.0.0.1:1 refuses writes: etcdserver: mvcc: database space exceeded"
OVER = "etcd can be used again after 9 s"


def test_unavailable_store_and_its_recovery_print_one_line_each(console: Console) -> None:
    view = PlainView(console)
    view.show(in_trouble(1, "False", "Available", ""))
    for seconds in (2, 3, 4):
        view.show(in_trouble(seconds, "True", "EtcdRefusesWrites", FULL))
    for seconds in (11, 12):
        view.show(in_trouble(seconds, "False", "Available", OVER))
    lines = printed(console).splitlines()
    assert [line for line in lines if FULL in line or OVER in line] == [
        f"[   2.00 s] {FULL}; workers that run go on, and no round can change until it is over",
        f"[  11.00 s] {OVER}",
    ]


def test_live_view_shows_unavailable_store() -> None:
    _, _, below = render(in_trouble(1, "True", "EtcdRefusesWrites", FULL), 80, 9)
    assert below.plain.splitlines()[0] == FULL
    _, _, below = render(in_trouble(1, "False", "Available", OVER), 80, 9)
    assert "etcd" not in below.plain


LONG = "a-job-with-a-name-of-fifty-five-characters-as-it-may-be"
MANY = tuple(
    NodeRow(f"{LONG}-{at}", str(at), "starting" if at == 40 else "running", 2) for at in range(64)
)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 16), (40, 10)])
def test_live_view_of_many_nodes_fits_its_terminal(width: int, height: int) -> None:
    console = Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None
    )
    view = LiveView(console)
    for number in range(9):
        view.note(number, f"note {number} of {LONG}-{number}")
    here = replace(snapshot(3, {"step": 7, "学習率": 0.5}, **FINAL), nodes=MANY)
    named = here.job.metadata.model_copy(update={"name": LONG})
    here = replace(here, job=here.job.model_copy(update={"metadata": named}))
    view.show(here)
    before = len(printed(console))
    view.show(here)
    bare = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", printed(console)[before:]).replace("\r", "\n")
    lines = [line for line in bare.split("\n") if line.strip()]
    assert max(map(cell_len, lines)) <= width
    assert len(lines) <= height
    assert "Running" in lines[0]
    assert any(line.rstrip().endswith("2") and "-40 " in line for line in lines), "not running"
    [rest] = [line for line in lines if line.startswith("and ")]
    assert re.match(r"and \d+ more: \d+ running", rest)
    assert "学習率 0.5" in bare
    assert "] Running, round 2 final" in lines[-1], "the newest note"
    view.close()


def test_few_nodes_have_a_line_each() -> None:
    assert chosen_nodes(MANY[:5], 5) == (list(MANY[:5]), "")
    shown, rest = chosen_nodes(MANY, 4)
    assert [row.ranks for row in shown] == ["0", "1", "40"]
    assert rest == "and 61 more: 61 running"
