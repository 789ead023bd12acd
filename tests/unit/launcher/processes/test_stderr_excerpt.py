"""Excerpts of a worker's standard error: its tail, and the head of its traceback."""

from __future__ import annotations

import pytest

from elasticjob_launcher.processes.worker_stream import TAIL_BYTES, error_excerpt

FRAMES = b'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    main()\n'
LONG = (
    b"RuntimeError: Error(s) in loading state_dict:" + b"\n\tMissing key(s): block" * 1500 + b"\n"
)


def test_short_stderr_is_kept_whole() -> None:
    assert error_excerpt(b"x" * 100 + FRAMES) == b"x" * 100 + FRAMES


@pytest.mark.parametrize("prefix", [b"", b"[rank3]: "])
def test_long_final_message_keeps_its_beginning_too(prefix: bytes) -> None:
    kept = (FRAMES + LONG).replace(b"\n", b"\n" + prefix).removesuffix(prefix)
    told = error_excerpt(b"log\n" * 9000 + prefix + kept)
    assert len(told) <= TAIL_BYTES + 16
    assert told.startswith(FRAMES.splitlines()[0])
    assert b"RuntimeError: Error(s) in loading" in told
    assert told.endswith(kept[-100:])


@pytest.mark.parametrize(
    "kept",
    [
        b"y" * 50_000,
        FRAMES + b"KeyError: 'caught'\n" + b"the log goes on\n" * 5000,
        FRAMES + b"  frames\n" * 5000,
    ],
    ids=["no traceback", "one that was caught", "one that was cut off"],
)
def test_other_long_stderr_keeps_only_its_end(kept: bytes) -> None:
    assert error_excerpt(kept) == kept[-TAIL_BYTES:]
