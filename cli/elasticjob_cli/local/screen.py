"""Standard output of a run; a full disk or a closed pipe does not end the run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO, Any, TextIO, cast

from rich.console import Console


class Screen:
    """Wrapper of `file` that drops text the file refuses.

    `gone` is True once its reader has closed it; `file` then writes to the null device.
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
            pass  # a full disk may accept the next line

    def _lose(self) -> None:
        """Redirect buffered and later output to the null device, so that no write fails."""
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, self._file.fileno())
        os.close(nowhere)
        self.gone = True
        with contextlib.suppress(OSError):
            print("elasticjob: the output was closed: draining", file=sys.stderr)


def console() -> Console:
    """Return a console for standard output, a terminal or not."""
    return Console(file=None if sys.stdout is None else cast("IO[str]", Screen(sys.stdout)))


def is_gone(shown_on: Console) -> bool:
    """Return True if the console's output was closed by its reader."""
    return isinstance(shown_on.file, Screen) and shown_on.file.gone
