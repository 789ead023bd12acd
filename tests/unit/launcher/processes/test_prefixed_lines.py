"""Prefixed lines from arbitrary pieces of a stream."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticjob_launcher.processes.worker_stream import MAX_HELD_BYTES, PrefixedLines


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"a\n"], b"> a\n"),
        ([b"a", b"b\nc", b"\n"], b"> ab\n> c\n"),
        ([b"\n\n"], b"> \n> \n"),
        ([b"end"], b"> end\n"),
        ([b"dos\r\n"], b"> dos\n"),
        ([b"\r 1%\r 50%\r100%\n"], b"> 100%\n"),
        ([b"\r 1%", b"\r 50%"], b">  50%\n"),
        ([b"\xff\x00\n"], b"> \xff\x00\n"),
        ([], b""),
    ],
)
def test_each_line_gets_the_prefix(pieces: list[bytes], expected: bytes) -> None:
    lines = PrefixedLines(b"> ")
    assert b"".join(map(lines.feed, pieces)) + lines.flush() == expected


def test_unfinished_line_is_buffered() -> None:
    lines = PrefixedLines(b"> ")
    assert lines.feed(b"one\ntw") == b"> one\n"
    assert lines.holds
    assert lines.feed(b"o\n") == b"> two\n"
    assert not lines.holds


def test_line_buffer_is_bounded() -> None:
    lines = PrefixedLines(b"> ")
    assert lines.feed(b"x" * MAX_HELD_BYTES) == b""
    assert lines.feed(b"y") == b"> " + b"x" * MAX_HELD_BYTES + b"y\n"
    assert not lines.holds


@given(st.lists(st.text("ab\n").map(str.encode)))
def test_lines_do_not_depend_on_chunk_boundaries(pieces: list[bytes]) -> None:
    lines, whole = PrefixedLines(b"> "), PrefixedLines(b"> ")
    assert b"".join(map(lines.feed, pieces)) + lines.flush() == (
        whole.feed(b"".join(pieces)) + whole.flush()
    )
