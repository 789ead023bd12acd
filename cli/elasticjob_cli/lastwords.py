"""Final summary of an ended job, printed even if standard output refuses it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def last_words() -> Iterator[None]:
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
            print(f"elasticjob: the output cannot be written: {refused.strerror}", file=sys.stderr)
