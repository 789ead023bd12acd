"""Report of a program's error by the process that was forked for it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from elasticjob_launcher.zygote.run_module import end_with_error


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
