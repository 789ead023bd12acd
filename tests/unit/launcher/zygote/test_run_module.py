"""Report of a program's error by the process that was forked for it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticjob_launcher.zygote.run_module import Target, end_with_error, unreadable_source


class Closed:
    def write(self, text: str) -> None:
        raise ValueError("I/O operation on closed file")

    def flush(self) -> None: ...


@pytest.mark.parametrize("stream", [None, Closed()])
def test_failed_hook_is_reported_without_a_stream(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], stream: Any
) -> None:
    """As Python does, which shows no traceback then."""
    ended: list[bool] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: 1 / 0)
    monkeypatch.setattr(sys, "stderr", stream)
    error = ValueError("of the program")
    end_with_error(error, lambda: ended.append(True))
    sys.excepthook(ValueError, error, None)
    assert ended == [True]
    assert capfd.readouterr().err.splitlines()[0] == "Error in sys.excepthook:"


def test_traceback_of_the_last_error_begins_at_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    monkeypatch.setattr(sys, "last_traceback", None, raising=False)
    program = compile("1 / 0", "train.py", "exec")
    try:
        exec(compile("exec(program)", "<string>", "exec"), {"program": program})
    except ZeroDivisionError as found:
        error = found
    end_with_error(error, lambda: None)
    traceback: Any = error.__traceback__
    sys.last_traceback = traceback
    sys.excepthook(type(error), error, traceback.tb_next)
    assert sys.last_traceback.tb_frame.f_code.co_filename == "train.py"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (b"print(1)\n", ""),
        ("# coding: latin-1\nx = '\u00e9'\n".encode("latin-1"), ""),
        (b"def (:\n", ""),
        (importlib.util.MAGIC_NUMBER + bytes(12), "compiled code"),
        (b"x = '\xe9'\n", "cannot be decoded"),
        (b"# coding: klingon\n", "unknown encoding: klingon"),
        (b"# coding: rot13\n", "is not a text encoding"),
        (b"x = 1\0\n", "null bytes"),
    ],
)
def test_script_that_is_no_source_text_is_found(tmp_path: Path, source: bytes, words: str) -> None:
    path = tmp_path / "train"
    path.write_bytes(source)
    found = unreadable_source(Target(False, str(path), (), ()))
    assert words in found if words else found == ""


def test_current_folder_has_the_path_that_python_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Target(False, ".", (), ()).path == str(tmp_path)
    assert Target(False, "./.", (), ()).path == f"{tmp_path}/./."
