"""Recovery time of a gang, from its workers' records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.events import FirstAllReduce, MalformedEvent, latest, read_events, recovered_at

FAULT_AT = 100.0


def world(at: float, *members: int) -> list[FirstAllReduce]:
    """Return a complete world of these members, the last of them half a second after the first."""
    step = 0.5 / max(1, len(members) - 1)
    return [
        FirstAllReduce(at + step * rank, pid=1000 + rank, member=m, rank=rank, world=len(members))
        for rank, m in enumerate(members)
    ]


OLD = world(90, 0, 1, 2, 3)


@pytest.mark.parametrize(
    ("events", "members", "expected"),
    [
        pytest.param([*OLD, *world(105, 0, 1, 2)], [0, 1, 2], 105.5, id="the latest counts"),
        pytest.param(OLD, [0, 1, 2, 3], None, id="before the fault does not count"),
        pytest.param([*OLD, *world(105, 0, 1, 2)[:2]], [0, 1, 2], None, id="one is missing"),
        pytest.param(
            [*OLD, *world(105, 0, 1, 2, 3)], [0, 1, 2], None, id="a world with the dead member"
        ),
        pytest.param(
            [*OLD, *world(103, 0, 1, 2), *world(108, 0, 1, 2, 4)],
            [0, 1, 2, 4],
            108.5,
            id="a world formed on the way is passed over",
        ),
        pytest.param(
            [*world(103, 0, 1), *world(105, 2, 3)], [0, 1, 2, 3], None, id="a gang that split"
        ),
        pytest.param(
            [FirstAllReduce(105, 1, member, rank=0, world=2) for member in (0, 1)],
            [0, 1],
            None,
            id="two rank zeros",
        ),
    ],
)
def test_recovered_at(
    events: Sequence[FirstAllReduce], members: Sequence[int], expected: float | None
) -> None:
    assert recovered_at(events, FAULT_AT, members) == expected


def test_latest_returns_newest_event_of_each_member_in_any_order() -> None:
    newer = world(105, 1, 0)
    assert latest([*newer, *OLD]) == {0: newer[1], 1: newer[0], 2: OLD[2], 3: OLD[3]}


def test_read_events_reads_all_files_by_time_without_drafts(tmp_path: Path) -> None:
    line = {"event": "first_allreduce", "pid": 7, "member": 0, "rank": 0, "world": 1}
    (tmp_path / "8-2.jsonl").write_text(json.dumps(line | {"at": 2.0}) + "\n")
    (tmp_path / "7-1.jsonl").write_text(json.dumps(line | {"at": 1.0}) + "\n")
    (tmp_path / ".9").write_text('{"event": "first_')
    assert [event.at for event in read_events(tmp_path)] == [1.0, 2.0]


@pytest.mark.parametrize("line", ["{", '{"at": 1.0}', "[]", '{"at": "soon"}'])
def test_malformed_event_names_its_file(tmp_path: Path, line: str) -> None:
    (tmp_path / "7-1.jsonl").write_text(line + "\n")
    with pytest.raises(MalformedEvent, match=r"7-1\.jsonl"):
        read_events(tmp_path)
