"""Standard output of a run, which is not ended by it: a full disk or a reader that went away."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO, Any, TextIO, cast

from rich.console import Console


class Screen:
    """Takes text for `file` and drops what that refuses.

    `gone` is true once nobody reads it any more; what is written to `file` then goes nowhere.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.gone = False

    def write(self, text: str) -> int:
        with self._guarded():
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with self._guarded():
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            self._lose()
        except OSError:
            pass  # a disk may have room again for the next line

    def _lose(self) -> None:
        """Nothing that is still in a buffer, or comes, can fail any more."""
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, self._file.fileno())
        os.close(nowhere)
        self.gone = True
        with contextlib.suppress(OSError):
            print("elasticjob: nobody reads the output any more: draining", file=sys.stderr)


def console() -> Console:
    """The terminal, or whatever standard output is."""
    return Console(file=None if sys.stdout is None else cast("IO[str]", Screen(sys.stdout)))


def is_gone(shown_on: Console) -> bool:
    """Whether nobody reads what is shown there."""
    return isinstance(shown_on.file, Screen) and shown_on.file.gone
