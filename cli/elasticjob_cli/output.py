"""Output: the functions by which all commands print, final summaries, atomic file writes.

No text of a job, a cluster or a worker reaches the terminal otherwise than through `show`,
`show_text`, `show_log` or `log_line`. A file gets the complete new content or keeps the old one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path

from elasticjob_rendezvous.protocol.text import bounded, one_line

_STYLE = re.compile(r"(\x1b\[[0-9;:]{0,32}m)")
"""SGR sequence, which changes colour and weight of the text that follows, and nothing else."""
_PLAIN_STYLE = "\x1b[0m"
DUMB = ("dumb", "unknown")
"""Values of TERM of terminals without control sequences."""


def show(*lines: str, err: bool = False) -> None:
    """Print each text as one line of printable characters; a newline in it is shown escaped."""
    from typer import echo  # imported here: `main` handles Ctrl-C before it loads anything

    for line in lines:
        echo(one_line(line), err=err)


def clear_screen() -> None:
    """Move the terminal's cursor to the first line, and clear the screen."""
    from typer import echo

    echo("\x1b[H\x1b[J", nl=False)


def show_candidates(lines: Iterable[str]) -> None:
    """Print the candidates of a completion, without loading more than the standard library."""
    print("\n".join(map(one_line, lines)))


def show_at_once(line: str) -> None:
    """Print a text as one line, without waiting and with the standard library alone."""
    print(one_line(line), flush=True)


def terminal_width() -> int | None:
    """Return the columns of the terminal, which tables and texts fit; None without a terminal."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def can_redraw() -> bool:
    """Return True if standard output is a terminal whose screen can be cleared and redrawn."""
    return terminal_width() is not None and os.environ.get("TERM") not in DUMB


def show_text(text: str, err: bool = False) -> None:
    """Print a text of several lines, all of them this program's own."""
    show(*text.removesuffix("\n").split("\n"), err=err)


def show_log(prefix: str, line: str) -> None:
    """Print a line of a worker's output after a prefix; its colours are kept at a terminal.

    A terminal without colours, or NO_COLOR in the environment, gets none.
    """
    from typer import echo

    bare = os.environ.get("NO_COLOR") or os.environ.get("TERM") in DUMB
    echo(one_line(prefix) + (plain_log_line(line) if bare else log_line(line)))


def log_line(line: str) -> str:
    """Return a line of a worker's output: its colours, and otherwise printable characters.

    Of a line that was rewritten by carriage returns, such as a progress bar, the last version
    remains, as on a terminal. The colours end with the line.
    """
    versions = [version for version in line.split("\r") if version]
    parts = _STYLE.split(versions[-1] if versions else "")
    text = "".join(part if at % 2 else one_line(part) for at, part in enumerate(parts))
    return text if len(parts) == 1 else text + _PLAIN_STYLE


def plain_log_line(line: str) -> str:
    """Return a line of a worker's output as `log_line` does, without its colours."""
    return _STYLE.sub("", log_line(line))


def show_error(message: str) -> None:
    """Print an error's message to standard error, each of its lines shortened if too long."""
    print("\n".join(map(one_line, bounded(message).split("\n"))), file=sys.stderr)


@contextlib.contextmanager
def final_summary() -> Iterator[None]:
    """Attempt the prints of the body; a failure is reported and changes no exit code."""
    refused = None
    try:
        yield
    except OSError as error:
        refused = error
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # None if it was closed when this process started
                stream.flush()
        except OSError as error:
            refused = error
            with contextlib.suppress(OSError):
                stream.close()  # else its buffer would be flushed again at exit
    if refused is not None and not sys.stderr.closed:
        with contextlib.suppress(OSError):
            show_error(f"elasticjob: the output cannot be written: {refused.strerror}")


_NOT_BESIDE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)
"""Errors of a folder without write permission, or of a file that is itself a mount point."""


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file's content; follow a symbolic link, write to a device or pipe.

    Raises OSError.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    try:
        replace_atomically(target, content)
    except OSError as error:
        if error.errno not in _NOT_BESIDE or not target.exists():
            raise
        overwrite_in_place(target, content)


def replace_atomically(target: Path, content: bytes) -> None:
    """Replace a file atomically: a reader sees the old or the new one. Raises OSError."""
    draft = target.with_name(f".elasticjob-{os.urandom(8).hex()}")
    try:
        with draft.open("xb") as file:
            if target.exists():
                before = target.stat()
                os.fchmod(file.fileno(), before.st_mode & 0o7777)
                with contextlib.suppress(OSError):  # another user's file: it becomes ours
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
            file.write(content)
        draft.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def overwrite_in_place(target: Path, content: bytes) -> None:
    """Overwrite a file in place without freeing its space first. Raises OSError."""
    with target.open("r+b", buffering=0) as file:
        before = file.read()
        try:
            _fill(file, content)
        except OSError:
            with contextlib.suppress(OSError):
                _fill(file, before)
            raise


def _fill(file: FileIO, content: bytes) -> None:
    file.seek(0)
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]
    file.truncate(len(content))
