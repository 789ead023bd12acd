"""What a job that has ended is said to have come to, also where nobody takes it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def last_words() -> Iterator[None]:
    """What is printed within is tried; whether it was taken changes no exit code."""
    refused = None
    try:
        yield
    except OSError as error:
        refused = error
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # it was closed when this process began
                stream.flush()
        except OSError as error:
            refused = error
            with contextlib.suppress(OSError):
                stream.close()  # what is left in its buffer would be tried once more
    if refused is not None and not sys.stderr.closed:
        with contextlib.suppress(OSError):
            print(f"elasticjob: the output cannot be written: {refused.strerror}", file=sys.stderr)
