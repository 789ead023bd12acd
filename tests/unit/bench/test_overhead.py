"""Arithmetic of the overhead benchmark."""

from __future__ import annotations

import pytest

from bench.overhead import Agent, Block, Turn, blocks, overhead, within


def test_incomplete_line_is_ignored() -> None:
    text = '{"at": 1.0, "step": 0.5, "pid": 1}\n{"at": 2.0, "st'
    assert blocks(text) == [Block(1.0, 0.5)]
    assert blocks("") == []


def test_only_blocks_within_one_phase_count() -> None:
    found = [Block(1.0, 9.0), Block(2.0, 0.5), Block(3.0, 0.4), Block(4.0, 0.1)]
    assert within(found, 1.0, 3.5) == 0.4
    assert within(found, 1.5, 3.5) == 0.4
    assert within(found, 2.5, 3.5) is None


def test_turns_are_compared_instead_of_times() -> None:
    turns = [Turn(1.0, 1.01), Turn(2.0, 2.02), Turn(1.0, 5.0)]
    assert overhead(turns) == pytest.approx(0.01)
    assert overhead([]) is None


def test_processor_time_is_percent_of_one_cpu() -> None:
    assert Agent(20.0, 0.1, 40.0).cpu_percent == 0.5
