"""Executor of the documentation's blocks: marks, output, failures, commands in the background."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.documentation import EXECUTED, Block, blocks_of
from tests.documented_session import BadMark, Mark, Session, commands_of, parsed, unprinted

ALL = [block for path in EXECUTED for block in blocks_of(path)]


def block(text: str, mark: str = "local", language: str = "console") -> Block:
    return Block("page.md", 1, language, text, mark)


def session(folder: Path) -> Session:
    return Session(folder, {"PATH": os.environ["PATH"]})


@pytest.mark.parametrize(
    "one", [each for each in ALL if each.language in ("sh", "console", "bash")], ids=str
)
def test_block_of_commands_is_executed_or_names_the_test_that_covers_it(one: Block) -> None:
    if parsed(one) is None:
        reason = one.mark.removeprefix("none: ")
        assert "tests/" in reason, f"{one}: name the test in {reason!r}"


@pytest.mark.parametrize("one", [each for each in ALL if each.mark], ids=str)
def test_tests_that_marks_name_exist(one: Block) -> None:
    for word in one.mark.split():
        if word.startswith("tests/"):
            assert Path(word.rstrip(";,.")).exists(), f"{one}: there is no {word}"


def test_words_of_a_mark_are_parsed() -> None:
    assert parsed(block("", "cluster")) == Mark("cluster")
    assert parsed(block("", 'local, background until "a, b", interrupt, output varies')) == Mark(
        "local", background="a, b", interrupt=True, varies=True
    )
    assert parsed(block("", 'local, repeat until "x", exit 3')) == Mark(
        "local", repeat="x", exit_code=3
    )
    assert parsed(block("", "none: tests/x")) is None


@pytest.mark.parametrize("mark", ["", "here", "local, background", "local, exit many", "none"])
def test_unknown_mark_is_refused(mark: str) -> None:
    with pytest.raises(BadMark, match=r"page\.md:1"):
        parsed(block("", mark))


def test_console_has_commands_with_continued_lines_and_output() -> None:
    text = "$ one \\\n    two\nprinted\nmore\n$ three\n"
    assert [(one.text, one.printed) for one in commands_of(block(text))] == [
        ("one \\\n    two", ("printed", "more")),
        ("three", ()),
    ]
    assert [one.text for one in commands_of(block("a\nb\n", language="sh"))] == ["a\nb\n"]


@pytest.mark.parametrize(
    ("page", "output", "missing"),
    [
        ("step 71  loss 0.37", "x\nstep 9   loss 2.5\n", None),
        ("job  2  13s", "job   12   1m5s", None),
        ("took 0.4 s (a.py)", "took 12.25 s (a.py)", None),
        ("2  join: a-1  30  4", "2  join: a-7  12  -", None),
        ("2  join: a-1  30  4", "2  join: a-1  12", "2  join: a-1  30  4"),
        ("2  join: a-1  30", "2  join: a--  12", "2  join: a-1  30"),
        ("in /home/you/.local/x: ok", "in /tmp/y: ok", None),
        ("a\n...\nc", "a\nb\nc", None),
        ("a\nb", "b\na", "b"),
        ("Running 2", "Failed 2", "Running 2"),
        ("is (x)", "is x", "is (x)"),
    ],
)
def test_lines_of_the_page_are_searched_in_the_output(
    page: str, output: str, missing: str | None
) -> None:
    assert unprinted(page.splitlines(), output) == missing


def test_files_are_written_and_commands_run_in_order(tmp_path: Path) -> None:
    page = [
        block("text\n", "file sub/a.txt", "python"),
        block("cat sub/a.txt > b\n", language="sh"),
        block("$ cat b\ntext\n$ echo done 3\ndone 7\n"),
        block("exit 1\n", "none: tests/"),
        block("exit 1\n", "cluster"),
    ]
    assert session(tmp_path).execute(page, "local") == 3


@pytest.mark.parametrize(
    ("one", "message"),
    [
        (block("false\ntrue\n", language="sh"), "exit code 1"),
        (block("$ echo a\nb\n"), "the page has the line 'b'"),
        (block("$ exit 2\n", "local, exit 3"), "exit code 2"),
        (block("$ echo a\n", 'local, background until "b"'), "'b' was never printed"),
    ],
)
def test_difference_from_the_page_fails(tmp_path: Path, one: Block, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        session(tmp_path).execute([one], "local")


def test_command_in_the_background_goes_on_beside_the_next_blocks(tmp_path: Path) -> None:
    waiting = "$ echo began; until test -e go; do sleep 0.05; done; echo ended\nbegan\nended\n"
    page = [
        block(waiting, 'local, background until "began"'),
        block("touch go\n", language="sh"),
    ]
    assert session(tmp_path).execute(page, "local") == 2


def test_command_is_repeated_until_it_prints_the_text(tmp_path: Path) -> None:
    text = "$ echo . >> tries; wc -l < tries\n"
    assert session(tmp_path).execute([block(text, 'local, repeat until "3"')], "local") == 1
    assert (tmp_path / "tries").read_text() == ".\n" * 3


def test_interrupted_command_ends_with_the_page(tmp_path: Path) -> None:
    text = "$ trap 'echo left; exit 130' INT; echo began; while true; do sleep 0.1; done\nleft\n"
    page = [block(text, 'local, background until "began", interrupt')]
    assert session(tmp_path).execute(page, "local") == 1
