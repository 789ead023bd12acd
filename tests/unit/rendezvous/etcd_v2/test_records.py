"""Value of `active_version`: torch's texts, byte for byte, and invalid values."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.etcd_v2.core import records
from elasticjob_rendezvous.etcd_v2.core.records import MalformedState, Status, printed, read

# As torch 2.13 wrote them to etcd 3.4.23.
TORCHS = [
    '{"status": "setup"}',
    '{"status": "joinable", "version": "1", "participants": []}',
    '{"status": "joinable", "version": "1", "participants": [0, 1]}',
    '{"status": "frozen", "version": "1", "participants": [0, 1], "keep_alives": []}',
    '{"status": "final", "version": "1", "participants": [0], "keep_alives":'
    ' ["/torchelastic/p2p/run_r/rdzv/v_1/rank_0"], "num_workers_waiting": 0}',
    '{"status": "closed", "version": "1", "participants": [0], "keep_alives":'
    ' ["/torchelastic/p2p/run_r/rdzv/v_1/rank_0"], "num_workers_waiting": 0}',
]


@pytest.mark.parametrize("text", TORCHS)
def test_state_prints_as_read(text: str) -> None:
    state = read(text)
    assert state.text == text
    assert printed(state.fields).text == text


def test_unknown_fields_are_kept() -> None:
    text = '{"mine": 1, "status": "joinable", "version": "7", "participants": [0], "more": [2]}'
    state = read(text)
    assert state.has(Status.JOINABLE, "7")
    assert printed({**state.fields, "participants": [0, 1]}).text == text.replace("[0]", "[0, 1]")


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "nonsense",
        "[]",
        '"final"',
        "{}",
        '{"status": "elsewhere"}',
        '{"status": "joinable", "participants": []}',
        '{"status": "joinable", "version": 1, "participants": []}',
        '{"status": "joinable", "version": "1"}',
        '{"status": "frozen", "version": "1", "participants": [0]}',
        '{"status": "final", "version": "1", "participants": [0], "keep_alives": []}',
        '{"status": "final", "version": "1", "participants": [], "keep_alives": [],'
        ' "num_workers_waiting": -1}',
    ],
)
def test_invalid_state_is_refused(text: str | None) -> None:
    with pytest.raises(MalformedState, match="active_version"):
        read(text)


def test_run_may_be_closed_before_its_first_version() -> None:
    state = read('{"status": "closed"}')
    assert state.version is None
    assert (state.participants, state.keep_alives, state.waiting) == ([], [], 0)


def test_times_to_live_match_torch() -> None:
    assert (
        records.SETUP_TTL_SECONDS,
        records.JOINABLE_TTL_SECONDS,
        records.FROZEN_TTL_SECONDS,
        records.KEEPALIVE_TTL_SECONDS,
        records.RUN_TTL_SECONDS,
        records.DEFAULT_TIMEOUT_SECONDS,
        records.DEFAULT_LAST_CALL_SECONDS,
    ) == (5, 10, 10, 10, 7200, 600, 30)
