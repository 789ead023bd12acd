"""The small files through which a worker and its agent speak. Only values; no I/O.

`ELASTICJOB_PROGRESS_FILE` is the worker's: a record of `RECORD_BYTES`, mapped into its memory and
written in place. A check sum tells a whole record from one that is just being written. A script
without this library may replace the file by a JSON object instead (docs/training.md).

`ELASTICJOB_REQUEST_FILE` is the agent's: one line of text of `REQUEST_BYTES`, blank until a
checkpoint is asked for.

`ELASTICJOB_SAVED_FILE` is for programs that can do no more: that it is there says that the worker
saves when it is asked, and each time it is written that a checkpoint is complete.
"""

from __future__ import annotations

import binascii
import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRESS_FILE = "ELASTICJOB_PROGRESS_FILE"
REQUEST_FILE = "ELASTICJOB_REQUEST_FILE"
SAVED_FILE = "ELASTICJOB_SAVED_FILE"

# -- progress -----------------------------------------------------------------------

MAGIC = b"EJP1"
MAX_METRICS = 8
NAME_BYTES = 24
SAVES = 1
"""Flag: the script asked to save before a planned stop."""

_HEAD = struct.Struct("<4sI")
_BODY = struct.Struct(f"<IIQqqqqQ{MAX_METRICS}d{MAX_METRICS * NAME_BYTES}s")
RECORD_BYTES = _HEAD.size + _BODY.size
NO_STEP = -1
MAX_STEP = 2**63 - 1
"""The largest step that a record holds, and that a status may show."""


class Record(NamedTuple):
    """What a worker says of itself. Times are milliseconds since 1970, 0 for never.

    Args:
        flags: `SAVES`.
        points: places passed at which all ranks could have saved together.
        step, at_ms: the last step that was told, and when; `NO_STEP` before the first.
        first_step_ms: when the first one was told.
        checkpoint_step: of the last checkpoint, or `NO_STEP`.
        checkpoints: how many were told.
        values, names: metrics, of which the first `metrics` count.
    """

    flags: int
    points: int
    step: int
    at_ms: int
    first_step_ms: int
    checkpoint_step: int
    checkpoints: int
    metrics: int
    values: tuple[float, ...]
    names: bytes


def pack(
    flags: int,
    points: int,
    step: int,
    at_ms: int,
    first_step_ms: int,
    checkpoint_step: int,
    checkpoints: int,
    metrics: int,
    values: Sequence[float],
    names: bytes,
) -> bytes:
    """A `Record` as it stands in the file: its fields one by one, for a worker is in a hurry."""
    body = _BODY.pack(
        flags,
        metrics,
        points,
        step,
        at_ms,
        first_step_ms,
        checkpoint_step,
        checkpoints,
        *values,
        names,
    )
    return _HEAD.pack(MAGIC, binascii.crc32(body)) + body


def unpack(content: bytes) -> Record | None:
    """The record in a file; None when there is none, or not all of it yet."""
    if len(content) < RECORD_BYTES or content[:4] != MAGIC:
        return None
    body = content[_HEAD.size : RECORD_BYTES]
    if _HEAD.unpack_from(content)[1] != binascii.crc32(body):
        return None
    flags, metrics, points, step, at_ms, first_ms, saved_step, saved, *rest = _BODY.unpack(body)
    return Record(
        flags, points, step, at_ms, first_ms, saved_step, saved, metrics, tuple(rest[:-1]), rest[-1]
    )


def pack_names(names: tuple[str, ...]) -> bytes:
    """Names of metrics; long ones are cut."""
    return b"".join(
        name.encode("utf-8", "replace")[:NAME_BYTES].ljust(NAME_BYTES, b"\0") for name in names
    ).ljust(MAX_METRICS * NAME_BYTES, b"\0")


def metrics_of(record: Record) -> dict[str, float]:
    """The metrics by name."""
    found = {}
    for index in range(min(record.metrics, MAX_METRICS)):
        raw = record.names[index * NAME_BYTES : (index + 1) * NAME_BYTES]
        found[raw.rstrip(b"\0").decode("utf-8", "replace")] = record.values[index]
    return found


# -- requests -----------------------------------------------------------------------

REQUEST_BYTES = 64
BLANK = 0x20
_WORD = "checkpoint"
WRITE_ORDER = ((16, REQUEST_BYTES), (11, 16), (0, 11))
"""In which parts the agent writes it: the numbers before the state, the word last."""


class Request(NamedTuple):
    """A checkpoint is wanted before this round's workers are stopped.

    Args:
        point: the place at which all ranks save; 0 while it is not agreed yet.
        seconds: how long there is, from when the request came.
    """

    point: int
    seconds: float


def pack_request(request: Request | None) -> bytes:
    """`checkpoint hold|at POINT SECONDS`, or blanks; every field always at the same place."""
    if request is None:
        return b" " * (REQUEST_BYTES - 1) + b"\n"
    state = "at  " if request.point else "hold"
    line = f"{_WORD} {state} {request.point:020d} {request.seconds:09.3f}"
    return line.encode().ljust(REQUEST_BYTES - 1) + b"\n"


def unpack_request(content: bytes) -> Request | None:
    """None for no request, and for anything else."""
    try:
        word, state, point, seconds = content.decode("ascii").split()
        request = Request(int(point) if state == "at" else 0, float(seconds))
    except ValueError:
        return None
    return request if word == _WORD and state in ("hold", "at") else None
