"""Waiting for a node's preloaded interpreter, and the reports about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticjob_agent.core.commands import LogLine, PrepareGroup, ReportLocal
from elasticjob_agent.core.events import (
    Event,
    PortReserved,
    RuntimeEvent,
    Timer,
)
from elasticjob_agent.core.reports import REASON_CHARACTERS
from elasticjob_agent.core.step import PREPARE_SECONDS, wake_at
from elasticjob_agent.core.worker_group import NO_REASON
from elasticjob_agent.worker_runtime import Hello, Prepared, Started
from elasticjob_rendezvous.protocol.worker_group import Local
from tests.unit.agent.builders import FACTS, Driven, hello, run


def warming() -> Driven:
    driven = Driven()
    driven.state = replace(driven.state, facts=replace(FACTS, warm_start=True))
    return driven


def able(heard: RuntimeEvent) -> RuntimeEvent:
    """Return the same hello, of a launcher that can preload."""
    assert isinstance(heard.event, Hello)
    return replace(heard, event=replace(heard.event, warms=True))


def is_ready(driven: Driven) -> bool:
    return driven.only(ReportLocal)[-1].local.ready


def test_new_node_takes_part_once_zygote_is_ready() -> None:
    driven = warming()
    assert PrepareGroup() in driven.feed(able(hello()))
    driven.feed(PortReserved(4000))
    assert not is_ready(driven)
    driven.feed(RuntimeEvent(Prepared(True)))
    assert is_ready(driven)
    assert "workers will start warm" in [note.text for note in driven.only(LogLine)]


def test_failed_zygote_does_not_delay_readiness() -> None:
    driven = warming()
    driven.feed(able(hello()))
    driven.feed(PortReserved(4000))
    driven.feed(RuntimeEvent(Prepared(False, "the command is a shell")))
    assert is_ready(driven)
    assert "workers will start cold: the command is a shell" in [
        n.text for n in driven.only(LogLine)
    ]


def test_wait_for_zygote_is_bounded() -> None:
    driven = warming()
    driven.feed(able(hello()))
    driven.feed(PortReserved(4000))
    due = wake_at(driven.state)
    assert due == pytest.approx(driven.state.prepare_by)
    driven.feed(Timer(), after=PREPARE_SECONDS + 0.1)
    assert is_ready(driven)
    assert wake_at(driven.state) is None


@pytest.mark.parametrize(
    "heard", [able(hello(running=2)), hello()], ids=["its workers run", "an older launcher"]
)
def test_agent_with_workers_or_older_launcher_does_not_wait_for_zygote(heard: Event) -> None:
    driven = warming()
    driven.feed(heard)
    driven.feed(PortReserved(4000))
    assert is_ready(driven)


def test_reconnected_worker_runtime_prepares_again_without_wait() -> None:
    driven = warming()
    driven.feed(able(hello()))
    driven.feed(PortReserved(4000))
    driven.feed(RuntimeEvent(Prepared(True)))
    assert PrepareGroup() in driven.feed(able(hello()))
    assert is_ready(driven)


def test_without_warm_start_no_zygote_is_prepared() -> None:
    driven = Driven()
    assert PrepareGroup() not in driven.feed(able(hello()))


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (Started(1, {0: 1, 1: 2}, True), ", warm"),
        (Started(1, {0: 1, 1: 2}, False, "the command changed"), ", cold: the command changed"),
    ],
)
def test_log_reports_warm_or_cold_start_of_round(event: Started, words: str) -> None:
    driven = Driven()
    driven.feed(hello())
    driven.feed(PortReserved(4000))
    driven.feed(run(1))
    driven.feed(RuntimeEvent(event))
    assert any(note.text.endswith(words) for note in driven.only(LogLine))


@pytest.mark.parametrize(
    ("event", "cold"),
    [
        (Started(1, {0: 1, 1: 2}, True), ""),
        (Started(1, {0: 1, 1: 2}, False, "the command changed\nat once"), "the command changed"),
        (Started(1, {0: 1, 1: 2}, False, "x" * 999), "x" * REASON_CHARACTERS),
        (Started(1, {0: 1, 1: 2}), NO_REASON),
    ],
    ids=["warm", "cold", "a long reason", "an older launcher"],
)
def test_rendezvous_record_reports_warm_or_cold_start_of_round(event: Started, cold: str) -> None:
    assert told_of(warming(), event).cold == cold


def test_cold_start_is_not_logged_when_warm_start_is_off() -> None:
    assert told_of(Driven(), Started(1, {0: 1}, False, "warm start is off")).cold is None


def test_start_kind_of_adopted_workers_is_unknown() -> None:
    driven = warming()
    driven.feed(able(hello(running=2)))
    driven.feed(PortReserved(4000))
    assert driven.only(ReportLocal)[-1].local.cold is None


def told_of(driven: Driven, event: Started) -> Local:
    driven.feed(hello())
    driven.feed(PortReserved(4000))
    driven.feed(run(1))
    driven.feed(RuntimeEvent(event))
    return driven.only(ReportLocal)[-1].local
