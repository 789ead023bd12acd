"""What is told of a worker's standard error when it ends: enough to see why. Pure."""

from __future__ import annotations

import re

TAIL_BYTES = 16 * 1024
"""Room for a traceback through a framework, with that of its cause."""
GAP = b"\n[...]\n"

_HEADER = b"Traceback (most recent call last):"
_RANK_PREFIX = re.compile(rb"(?m)^\[rank\d+\]: ?")


def telling(kept: bytes) -> bytes:
    """The end of `kept`; where a traceback with a longer message ends it, its beginning as well.

    Only a message whose further lines are indented is known for one: others may be a log that goes
    on after an exception that was caught.
    """
    begin = kept.rfind(_HEADER)
    if len(kept) <= TAIL_BYTES or begin < 0 or begin >= len(kept) - TAIL_BYTES:
        return kept[-TAIL_BYTES:]
    lines = _RANK_PREFIX.sub(b"", kept[begin:]).split(b"\n")
    outer = [n for n, line in enumerate(lines) if n and line[:1].strip()]
    if len(outer) != 1:
        return kept[-TAIL_BYTES:]
    half = TAIL_BYTES // 2
    return kept[begin : begin + half] + GAP + kept[-half:]
