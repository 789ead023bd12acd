"""Format of the small files that a worker and its agent exchange. No I/O.

The worker writes `ELASTICJOB_PROGRESS_FILE`: a record of `RECORD_BYTES`, mapped into its memory
and updated in place. A checksum detects incomplete updates. A script without this library may
replace the file with a JSON object instead (docs/training.md).

The agent writes `ELASTICJOB_REQUEST_FILE`: one line of text of `REQUEST_BYTES`, blank until it
requests a checkpoint.

In the progress file three sections follow the record: a report on snapshots, the worker's answer to
checkpoint requests, and the reason for lost steps. Earlier releases do not read them.

`ELASTICJOB_SAVED_FILE` is for programs that cannot use the other files: its existence announces
that the worker saves on request, and each write to it reports a complete checkpoint.
"""

from __future__ import annotations

import binascii
import enum
import struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRESS_FILE = "ELASTICJOB_PROGRESS_FILE"
REQUEST_FILE = "ELASTICJOB_REQUEST_FILE"
SAVED_FILE = "ELASTICJOB_SAVED_FILE"
SNAPSHOT_FOLDER = "ELASTICJOB_SNAPSHOT_FOLDER"
"""Variable with the node's folder in memory for snapshots, which its launcher owns."""
SNAPSHOT_TROUBLE = "ELASTICJOB_SNAPSHOT_TROUBLE"
"""Variable with the errno and the parent of a folder that the launcher cannot create."""
JOB = "ELASTICJOB_JOB"
"""Variable with the namespace and the name of the job, which own its snapshots in storage."""
SNAPSHOTS = "ELASTICJOB_SNAPSHOTS"
"""Variable with the job's `recovery.snapshots` for the training script: a JSON object."""

# -- progress -----------------------------------------------------------------------

MAGIC = b"EJP1"
MAX_METRICS = 8
NAME_BYTES = 24
SAVES = 1
"""Flag: the script wants to save a checkpoint before a planned stop."""
REPORTS = 2
"""Flag: the worker reports that checkpoint once it is complete; no report means no checkpoint."""
KEEPS = 4
"""Flag: instead of a checkpoint, the worker can take a snapshot in the memory of the nodes before a
planned stop. It reports the snapshot like a checkpoint."""
RESUMED = 8
"""Flag: the worker has restored, and its first `Snapshots.save` since then has returned."""

_HEAD = struct.Struct("<4sI")
_BODY = struct.Struct(f"<IIQqqqqQ{MAX_METRICS}d{MAX_METRICS * NAME_BYTES}s")
RECORD_BYTES = _HEAD.size + _BODY.size
NO_STEP = -1
MAX_STEP = 2**63 - 1
"""Maximum step in a record and in a status."""


class Record(NamedTuple):
    """Progress report of a worker. Times are milliseconds since 1970, 0 for never.

    Args:
        flags: `SAVES` and `REPORTS`, `KEEPS`, or 0; and `RESUMED`.
        points: number of points passed at which all ranks could have saved together.
        step, at_ms: last reported step and its time; `NO_STEP` before the first.
        first_step_ms: time of the first report.
        checkpoint_step: step of the last checkpoint, or `NO_STEP`.
        checkpoints: number of reported checkpoints.
        values, names: metrics, of which the first `metrics` are valid.
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
    """Encode the fields of a `Record`, passed separately for speed in the worker."""
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
    """Decode the record of a file; return None if it is missing or incomplete."""
    body = _checked(content[:RECORD_BYTES], MAGIC, RECORD_BYTES)
    if body is None:
        return None
    flags, metrics, points, step, at_ms, first_ms, saved_step, saved, *rest = _BODY.unpack(body)
    return Record(
        flags, points, step, at_ms, first_ms, saved_step, saved, metrics, tuple(rest[:-1]), rest[-1]
    )


def _framed(magic: bytes, body: bytes) -> bytes:
    """Return the magic number and the checksum of a body, and the body."""
    return _HEAD.pack(magic, binascii.crc32(body)) + body


def _checked(content: bytes, magic: bytes, size: int) -> bytes | None:
    """Return the body of a section of `size` bytes; None if it is missing or incomplete."""
    if len(content) < size or content[:4] != magic:
        return None
    body = content[_HEAD.size :]
    return body if _HEAD.unpack_from(content)[1] == binascii.crc32(body) else None


def pack_names(names: tuple[str, ...]) -> bytes:
    """Encode the names of metrics, truncated to `NAME_BYTES`."""
    return b"".join(
        name.encode("utf-8", "replace")[:NAME_BYTES].ljust(NAME_BYTES, b"\0") for name in names
    ).ljust(MAX_METRICS * NAME_BYTES, b"\0")


def metrics_of(record: Record) -> dict[str, float]:
    """Return the metrics by name."""
    found = {}
    for index in range(min(record.metrics, MAX_METRICS)):
        raw = record.names[index * NAME_BYTES : (index + 1) * NAME_BYTES]
        found[raw.rstrip(b"\0").decode("utf-8", "replace")] = record.values[index]
    return found


# -- snapshots ----------------------------------------------------------------------

_REPORT_MAGIC = b"EJS1"
_REPORT = struct.Struct("<qqqqQIqqQQ")
REPORT_BYTES = _HEAD.size + _REPORT.size
ANSWER_START = RECORD_BYTES + REPORT_BYTES
"""Offset of the answer."""
FITS, NO_ROOM, UNUSABLE = range(3)
"""States of the memory for snapshots: it has room for two; it does not; it cannot be used."""
_ERRNO_AT, _STORAGE_AT = 8, 20
"""Positions of the numbers of two errors in `SnapshotReport.trouble`, of 12 bits each."""
_ERRNO_MASK = (1 << 12) - 1


def unusable(number: int | None) -> int:
    """Return the value of `SnapshotReport.trouble` for memory that is unusable due to an errno."""
    return UNUSABLE | ((number or 0) & _ERRNO_MASK) << _ERRNO_AT


def with_storage(trouble: int, number: int) -> int:
    """Return `trouble` with the errno `number` of the last write to storage; 0 means success."""
    memory = trouble & ((1 << _STORAGE_AT) - 1)
    return memory | (number & _ERRNO_MASK) << _STORAGE_AT


def trouble_of(value: int) -> tuple[int, int]:
    """Return the state of the memory in a report, and its errno if it is `UNUSABLE`."""
    return value & ((1 << _ERRNO_AT) - 1), value >> _ERRNO_AT & _ERRNO_MASK


def storage_trouble_of(value: int) -> int:
    """Return the errno of the last write to storage in a report; 0 if it has not failed."""
    return value >> _STORAGE_AT & _ERRNO_MASK


class Loss(enum.IntEnum):
    """Reason for which the last step of the previous round was lost: it has no stop copy.

    If the ranks report different reasons, the highest one counts. The numbers are part of the
    format.
    """

    UNKNOWN = 0
    WORKERS_ENDED = 1
    """No worker that held that step was alive to copy it, or it ended during the copy."""
    IN_STEP = 2
    """The workers stopped between the step of an optimizer and the end of `save`."""
    COPY_LATE = 3
    """Another worker of the node did not complete its copy in time."""
    COPY_TOO_LONG = 4
    """A copy would have taken longer than the steps since the last snapshot."""
    RANK_STATE_MISSING = 5
    """The own state of a rank for that step was not found on the node."""
    WRITE_FAILED = 6
    """The copy could not be written."""
    STATE_CHANGED = 7
    """Something other than the optimizers had changed the parameters or their state."""
    STEPS_SKIPPED = 8
    """`save` was not called after each step of the optimizers."""
    COST = 9
    """Holding the state of each step took too large a share of the training time."""
    UNSUPPORTED_STATE = 10
    """The state has a value that cannot be held, such as a sparse tensor or one on a GPU."""
    RANK_STATE_TOO_LARGE = 11
    """The own state of a rank exceeds the maximum size for a stop copy."""
    STATE_TOO_LARGE = 12
    """Too many bytes of the state are outside the optimizers."""
    NO_TENSORS = 13
    """The state that a rank passed to `save` has no tensors."""
    SHARDED = 14
    """The state is sharded."""
    ON_DEVICE = 15
    """Parameters are on a GPU."""
    NO_MEMORY = 16
    """The memory of a node for snapshots cannot be used."""
    NO_OPTIMIZERS = 17
    """`Snapshots` was created without `optimizers`."""

    @property
    def reason(self) -> str:
        """Name in records and in the status, such as `NoOptimizers`; empty if it is unknown."""
        return self.name.title().replace("_", "") if self else ""


class SnapshotReport(NamedTuple):
    """Report of a worker on its snapshots. Steps are `NO_STEP` if there is no such snapshot.

    Args:
        step: step of the newest snapshot that is complete in the memory of this node.
        stored: step of the newest snapshot that is complete in storage, known to rank 0.
        replicated: step of the newest snapshot with confirmed copies on other nodes; `NO_STEP`
            before the first of this round, and while copies fail.
        replicas: number of copies of each rank's own state on other nodes; 0 for none.
        size: bytes of this worker's parts of one snapshot in the memory of this node.
        trouble: `FITS`, `NO_ROOM` or the result of `unusable`, after `with_storage`.
        restored: step at which this round began.
        lost: number of steps of earlier rounds that are repeated; `NO_STEP` if unknown.
        lost_ms: duration of these steps.
        limit: bytes that the job allows for the snapshots of a node; 0 without a limit.
        loss: `Loss` of the lost steps.
    """

    step: int = NO_STEP
    stored: int = NO_STEP
    replicated: int = NO_STEP
    replicas: int = 0
    size: int = 0
    trouble: int = FITS
    restored: int = NO_STEP
    lost: int = NO_STEP
    lost_ms: int = 0
    limit: int = 0
    loss: int = Loss.UNKNOWN


def pack_report(report: SnapshotReport) -> bytes:
    """Encode a report on snapshots without its `loss`; numbers above `MAX_STEP` become that."""
    numbers = (min(value, MAX_STEP) for value in report[:-1])
    return _framed(_REPORT_MAGIC, _REPORT.pack(*numbers))


def unpack_report(content: bytes) -> SnapshotReport | None:
    """Decode the report in a progress file; return None if it is missing or incomplete.

    A library of an earlier release writes no `loss`.
    """
    body = _checked(content[RECORD_BYTES:ANSWER_START], _REPORT_MAGIC, REPORT_BYTES)
    if body is None:
        return None
    report = SnapshotReport(*_REPORT.unpack(body))
    body = _checked(content[LOSS_START:FILE_BYTES], _LOSS_MAGIC, LOSS_BYTES)
    return report if body is None else report._replace(loss=loss_of(*_LOSS.unpack(body)))


# -- answers ------------------------------------------------------------------------

_ANSWER_MAGIC = b"EJA1"
ERROR_BYTES = 400
"""Maximum size of an error in an answer, in UTF-8."""
_ANSWER = struct.Struct(f"<QQ{ERROR_BYTES}s")
ANSWER_BYTES = _HEAD.size + _ANSWER.size
LOSS_START = ANSWER_START + ANSWER_BYTES
"""Offset of the reason for lost steps, with which the file ends; earlier releases end here."""


class Answer(NamedTuple):
    """Answer of a worker to requests for a checkpoint, by the points that it had passed.

    Args:
        saved: points passed at the last report of a complete checkpoint; 0 before the first.
        failed: points passed when the last checkpoint failed on all ranks; 0 if none has.
        error: text of that failure.
    """

    saved: int = 0
    failed: int = 0
    error: str = ""


def pack_answer(answer: Answer) -> bytes:
    """Encode an answer; its error is cut to `ERROR_BYTES`."""
    error = answer.error.encode("utf-8", "replace")[:ERROR_BYTES]
    return _framed(_ANSWER_MAGIC, _ANSWER.pack(answer.saved, answer.failed, error))


def unpack_answer(content: bytes) -> Answer | None:
    """Decode the answer in a progress file; return None if it is missing or incomplete."""
    body = _checked(content[ANSWER_START:LOSS_START], _ANSWER_MAGIC, ANSWER_BYTES)
    if body is None:
        return None
    saved, failed, error = _ANSWER.unpack(body)
    return Answer(saved, failed, error.rstrip(b"\0").decode("utf-8", "replace"))


# -- lost steps ---------------------------------------------------------------------

_LOSS_MAGIC = b"EJL1"
_LOSS = struct.Struct("<I")
LOSS_BYTES = _HEAD.size + _LOSS.size
FILE_BYTES = LOSS_START + LOSS_BYTES


def pack_loss(loss: int) -> bytes:
    """Encode the reason for lost steps, of a report on snapshots."""
    return _framed(_LOSS_MAGIC, _LOSS.pack(loss))


def loss_of(number: int) -> Loss:
    """Return the reason with a number; `Loss.UNKNOWN` for one of a later release."""
    try:
        return Loss(number)
    except ValueError:
        return Loss.UNKNOWN


# -- requests -----------------------------------------------------------------------

REQUEST_BYTES = 64
BLANK = 0x20
_WORD = "checkpoint"
WRITE_ORDER = ((16, REQUEST_BYTES), (11, 16), (0, 11))
"""Byte ranges in the agent's write order: the numbers before the state, the keyword last."""


class Request(NamedTuple):
    """Request for a checkpoint before this round's workers are stopped.

    Args:
        point: point at which all ranks save; 0 until it is agreed.
        seconds: time available, from the arrival of the request.
    """

    point: int
    seconds: float


def pack_request(request: Request | None) -> bytes:
    """Encode `checkpoint hold|at POINT SECONDS`, or blanks; every field has a fixed position."""
    if request is None:
        return b" " * (REQUEST_BYTES - 1) + b"\n"
    state = "at  " if request.point else "hold"
    line = f"{_WORD} {state} {request.point:020d} {request.seconds:09.3f}"
    return line.encode().ljust(REQUEST_BYTES - 1) + b"\n"


def unpack_request(content: bytes) -> Request | None:
    """Decode a request; return None if there is none or it is malformed."""
    try:
        word, state, point, seconds = content.decode("ascii").split()
        request = Request(int(point) if state == "at" else 0, float(seconds))
    except ValueError:
        return None
    return request if word == _WORD and state in ("hold", "at") else None
