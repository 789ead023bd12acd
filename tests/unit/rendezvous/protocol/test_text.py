"""User input repeated in error messages."""

from __future__ import annotations

import sys
import unicodedata

import pytest

from elasticjob_rendezvous.protocol.text import (
    LONGEST_ECHO,
    LONGEST_LINE,
    bounded,
    counted,
    echoed,
    hint,
    one_cell,
    one_line,
    printable,
)

VISIBLE_FORMATS = "\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2"
"""Format characters with a glyph: signs of Arabic and Syriac that enclose numbers."""


def test_characters_that_are_no_text_are_escaped() -> None:
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        category = unicodedata.category(character)
        unsafe = category in ("Cc", "Cs", "Zl", "Zp") or (
            category == "Cf" and character not in VISIBLE_FORMATS and code < 0x11000
        )
        unsafe |= category == "Cf" and code >= 0xE0000
        shown = one_cell(character)
        if unsafe:
            assert shown.startswith("\\"), hex(code)
            assert shown.encode("ascii").decode().isprintable(), hex(code)
        elif category[0] in "LNPS" and shown != character:
            assert character in "\u115f\u1160\u3164\uffa0", hex(code)  # letters without a glyph


@pytest.mark.parametrize(
    ("text", "lines", "line", "cell"),
    [
        ("plain", "plain", "plain", "plain"),
        ("a\nb\tc", "a\nb\tc", "a\\nb\tc", "a\\nb\\tc"),
        ("\x1b]52;c;aGk=\x07", *[r"\x1b]52;c;aGk=\x07"] * 3),
        ("a\rb\x08", *[r"a\rb\x08"] * 3),
        ("\x9b31m \x7f \x85", *[r"\x9b31m \x7f \x85"] * 3),
        (
            "nom de l\u2019\u00e9t\u00e9 \u4e2d\u6587 \U0001f600",
            *["nom de l\u2019\u00e9t\u00e9 \u4e2d\u6587 \U0001f600"] * 3,
        ),
        ("\u202egpj.exe\u2069", *[r"\u202egpj.exe\u2069"] * 3),
        ("digits\u200b-0", *[r"digits\u200b-0"] * 3),
        ("\ud800", *[r"\ud800"] * 3),
    ],
)
def test_foreign_text_is_shown_with_visible_escapes(
    text: str, lines: str, line: str, cell: str
) -> None:
    assert (printable(text), one_line(text), one_cell(text)) == (lines, line, cell)
    assert (printable(lines), one_line(line), one_cell(cell)) == (lines, line, cell)


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


@pytest.mark.parametrize(("count", "text"), [(0, "0 nodes"), (1, "1 node"), (2, "2 nodes")])
def test_count_of_one_has_the_noun_in_the_singular(count: int, text: str) -> None:
    assert counted(count, "node") == text
