"""Non-blocking writers of output."""

from __future__ import annotations

import threading
import time

import pytest

from elasticjob_launcher.processes import output
from elasticjob_launcher.processes.output import PIECE_BYTES, QUEUE_BYTES, Target, Writer


class Gate(Target):
    """Target that accepts writes once it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.open.wait(60)
        if data == b"bad":
            raise OSError(28, "No space left on device")
        self.written.append(data)

    def close(self) -> None:
        self.closed = True


def test_stuck_target_loses_only_its_own_output_with_a_note() -> None:
    writer, gate = Writer("test", on_trouble=lambda error: None), Gate()
    piece = bytes(QUEUE_BYTES // 8 - PIECE_BYTES)
    began = time.monotonic()
    for _ in range(10):
        writer.put(gate, piece)
    writer.flush(time.monotonic() + 0.05)  # gives up at its deadline
    assert time.monotonic() - began < 50
    gate.open.set()
    writer.flush(time.monotonic() + 60)
    writer.put(gate, b"later")
    writer.close(gate)
    writer.flush(time.monotonic() + 60)
    assert gate.written[:8] == [piece] * 8
    note = b"[elasticjob] %d bytes left out: " % (2 * len(piece))
    assert gate.written[8].startswith(note)
    assert gate.written[8].endswith(b"later")
    assert gate.closed


def test_queue_of_many_small_pieces_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes far more memory than it has bytes."""
    monkeypatch.setattr(output, "QUEUE_BYTES", 100 * PIECE_BYTES)
    writer, gate = Writer("test", on_trouble=lambda error: None), Gate()
    for _ in range(1000):
        writer.put(gate, b"x")
    gate.open.set()
    writer.close(gate)
    writer.flush(time.monotonic() + 60)
    written = b"".join(gate.written)
    assert len(gate.written) <= 101
    assert b"bytes left out" in written


def test_write_error_is_reported_and_writing_continues() -> None:
    troubles: list[OSError] = []
    writer, gate = Writer("test", troubles.append), Gate()
    gate.open.set()
    for data in (b"a", b"bad", b"b"):
        writer.put(gate, data)
    writer.flush(time.monotonic() + 60)
    assert gate.written == [b"a", b"b"]
    assert [error.errno for error in troubles] == [28]
