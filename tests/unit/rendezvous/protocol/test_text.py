"""User input repeated in error messages."""

from __future__ import annotations

import pytest

from elasticjob_rendezvous.protocol.text import LONGEST_ECHO, LONGEST_LINE, bounded, echoed, hint


@pytest.mark.parametrize("value", ["", "a word", "it's", 7, None, ["one", "two"], "x" * 198])
def test_short_value_is_echoed_unchanged(value: object) -> None:
    assert echoed(value) == repr(value)


@pytest.mark.parametrize("value", ["x" * 199, "x" * 10_000_000, ["word"] * 1000, b"\n" * 999])
def test_long_value_is_echoed_by_its_ends_and_length(value: object) -> None:
    text = echoed(value)
    assert len(text) <= LONGEST_ECHO + len("… (10000002 characters)")
    assert text.startswith(repr(value)[:10])
    assert f"{repr(value)[-5:]} ({len(repr(value))} characters)" in text
    assert "\n" not in text


def test_every_line_of_a_message_ends() -> None:
    message = "\n".join(["one", "x" * 10_000_000, "", "y" * LONGEST_LINE])
    first, long, *rest = bounded(message).split("\n")
    assert (first, rest) == ("one", ["", "y" * LONGEST_LINE])
    assert long.endswith("xxx (10000000 characters)")
    assert len(long) < LONGEST_LINE + 30


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("settel", "did you mean settle?"),
        ("nothing", "known are confirm, settle"),
        ("x" * 10_000_000, "known are confirm, settle"),
    ],
)
def test_nearest_known_name_is_suggested(typed: str, said: str) -> None:
    assert hint(typed, {"settle", "confirm"}) == said
