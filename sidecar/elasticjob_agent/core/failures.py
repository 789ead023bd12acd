"""First failure among a node's workers, its failure class and its failure record.

The class follows from the worker's exit and its error output. The patterns match the output of
torch 2.13 with gloo, NCCL and its TCP store when a peer is lost, a port is in use or memory
runs out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from elasticjob_agent.core.error_reports import (
    ABORTED_AT_EXIT,
    ErrorReport,
    encodable,
    from_error_file,
    from_stderr,
    last_line,
)
from elasticjob_agent.core.hang import before_dump, last_step, parse_stack
from elasticjob_agent.core.state import (
    Facts,
    StopCause,
    WorkerEnded,
    WorkerGroup,
)
from elasticjob_agent.worker_runtime import WorkerExited
from elasticjob_rendezvous.protocol.records.codec import encode
from elasticjob_rendezvous.protocol.records.failures import (
    ECHOES,
    FAILURE_BYTES,
    Failure,
    FailureClass,
    exit_text,
)

NOT_EXECUTABLE, NOT_FOUND = 126, 127
SIGABRT, SIGKILL = 6, 9

SIGNALS: Mapping[int, str] = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS",
    8: "SIGFPE", 9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE",
    14: "SIGALRM", 15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS",
}  # fmt: skip
"""Linux signal numbers: workers run on Linux, the reader may run elsewhere."""

_MASTER_PORT = re.compile(r"server socket has failed to (?:listen|bind).*EADDRINUSE", re.DOTALL)
_DEVICE_MEMORY = re.compile(
    r"^torch\.(?:[\w.]+\.)?OutOfMemoryError\b|\b(?:CUDA|HIP|XPU) out of memory"
    r"|(?:CUDA|HIP) error: out of memory|Cuda failure (?:\d+ )?'out of memory'"
    r"|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation",
    re.MULTILINE,
)
_HOST_MEMORY = re.compile(
    r"(?:^|sub-exceptions?\): )(?:[\w.]*OutOfMemoryError|MemoryError|[\w.]*ArrayMemoryError)\b"
    r"|std::bad_alloc"
    r"|can't allocate memory|Cannot allocate memory"
    r"|out of shared memory|unable to (?:allocate|write to|mmap|resize) .*shared memory",
    re.MULTILINE,
)
_HELPER_KILLED = re.compile(
    r"DataLoader worker .*killed by signal: Killed|died with <Signals\.SIGKILL: 9>"
    r"|terminated with signal SIGKILL|process pool was terminated abruptly"
)
_TIMED_OUT = re.compile(
    r"gloo.*Timed out waiting \d+ ?ms|failed to pass monitoredBarrier in"
    r"|Watchdog caught collective operation timeout|[Ww]ait timeout after \d+ ?ms"
    r"|Timed out after \d+ seconds waiting for clients|client socket has timed out after"
    r"|Socket Timeout",
    re.DOTALL,
)
_COLLECTIVE = re.compile(
    r"gloo/transport|Connection closed by peer \[|monitoredBarrier"
    r"|DistNetworkError|DistStoreError|DistBackendError|ncclRemoteError|ncclSystemError"
    r"|NCCL communicator was aborted|Watchdog caught collective|ProcessGroupNCCL's watchdog"
    r"|\bRankEndedError\b"
)
# The operating system's messages for a lost peer may concern a socket of the user's code: they
# count only below frames of torch.distributed.
_LOST_PEER = re.compile(r"Broken pipe|Connection (?:reset by peer|refused|aborted)")
# Excludes torch's launcher: a script's own decorator runs below its frames.
_TORCH_DISTRIBUTED = re.compile(r"torch[/.]distributed(?![/.](?:elastic|run|launch))|ProcessGroup")


SHELLS = 128
"""Offset that a shell adds to the signal number of its last command."""
CRASHES = frozenset({4, 6, 7, 8, 11})
"""Signals raised by the worker's own code and reported by Python's faulthandler."""


def ending_text(exit_: WorkerExited) -> str:
    """Return a readable description of a worker's exit."""
    if exit_.signal is not None:
        return f"killed by {SIGNALS.get(exit_.signal, f'signal {exit_.signal}')}"
    within = signal_within(exit_)
    cause = "" if within is None else f": a command in it was killed by {SIGNALS[within]}"
    return f"{exit_text(exit_.exit_code)}{cause}"


def signal_within(exit_: WorkerExited) -> int | None:
    """Return the signal that killed a command in the worker's shell, from the exit code."""
    signum = (exit_.exit_code or 0) - SHELLS
    return signum if signum in SIGNALS else None


def failure_class(
    exit_: WorkerExited | None, error_report: ErrorReport | None, rank: int
) -> FailureClass:
    """Return the failure class, checking the most specific evidence first.

    Args:
        exit_: None if the worker still runs and only its error file is known.
        error_report: the worker's own error report, if any.
        rank: the global rank; only rank 0 listens at MASTER_PORT.
    """
    if error_report is not None:
        by_words = _by_report(error_report, rank)
        if by_words is not None:
            return by_words
    if exit_ is None:
        return FailureClass.USER_ERROR
    within = None if error_report is not None else signal_within(exit_)
    killed = SIGKILL in (exit_.signal, within)
    if exit_.out_of_memory and (killed or _helper_killed(exit_, error_report)):
        return FailureClass.HOST_OUT_OF_MEMORY
    if exit_.signal == SIGABRT:
        if error_report is not None and error_report.is_nested_launch:
            return FailureClass.USER_ERROR  # torchrun's plug-in aborted the worker
        # C++ aborted the process, as NCCL's watchdog does from its own thread.
        if by_text := _by_text(exit_.stderr_tail, False):
            return by_text
        if error_report is not None and ABORTED_AT_EXIT in exit_.stderr_tail:
            return FailureClass.USER_ERROR  # the exception preceded the abort
    if exit_.signal is not None or within is not None:
        return FailureClass.SIGNAL
    if exit_.exit_code in (NOT_EXECUTABLE, NOT_FOUND):
        return FailureClass.LAUNCH_ERROR
    return FailureClass.USER_ERROR


def _by_report(error_report: ErrorReport, rank: int) -> FailureClass | None:
    """Return the class that the exception, or else its nearest conclusive cause, indicates."""
    reports = [(error_report.message, error_report.own or error_report.traceback)]
    reports += [(cause.message, cause.own) for cause in error_report.causes]
    kinds = (_by_message(message, traceback, rank) for message, traceback in reports)
    return next((kind for kind in kinds if kind is not None), None)


def _by_message(message: str, traceback: str, rank: int) -> FailureClass | None:
    if _MASTER_PORT.search(message):
        return FailureClass.MASTER_PORT if rank == 0 else FailureClass.USER_ERROR
    of_torch = _TORCH_DISTRIBUTED.search(f"{message}\n{traceback}") is not None
    if by_text := _by_text(message, of_torch):
        return by_text
    return FailureClass.PEER_ABORT if of_torch and _LOST_PEER.search(message) else None


def _by_text(message: str, of_torch: bool) -> FailureClass | None:
    """Return the class that a message indicates; some patterns count only in torch.distributed."""
    if _DEVICE_MEMORY.search(message):
        return FailureClass.CUDA_OUT_OF_MEMORY
    if _HOST_MEMORY.search(message):
        return FailureClass.HOST_OUT_OF_MEMORY
    collective = _COLLECTIVE.search(message) is not None
    if (collective or of_torch) and _TIMED_OUT.search(message):
        return FailureClass.COLLECTIVE_TIMEOUT
    return FailureClass.PEER_ABORT if collective else None


def _helper_killed(exit_: WorkerExited, error_report: ErrorReport | None) -> bool:
    """Return True if a child process of the worker was killed, not the worker itself."""
    if error_report is None:
        return _HELPER_KILLED.search(exit_.stderr_tail) is not None
    messages = (error_report.message, *(cause.message for cause in error_report.causes))
    return any(_HELPER_KILLED.search(message) for message in messages)


MESSAGE_CHARACTERS = 1000
UNKNOWN_RANK = -1
UNCAUGHT = 1
"""Python's exit code after an uncaught exception. With any other exit, a traceback that is not at
the very end of the output was caught and logged."""
ENDED_ON_TERM = 143  # a shell's exit code for SIGTERM

_CAUSES = (None, StopCause.FAILURE, StopCause.PEER_FAILURE, StopCause.HANG)
"""Stop causes (or none) during which a worker's exit may still reveal the first failure."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    failure: Failure
    ended_at_ms: int

    def order(self) -> tuple[int, int, int, int]:
        """Return a sort key; the lowest is the first failure.

        An aborted collective shows that a peer failed earlier. A collective that timed out ends
        its process, which aborts the collectives of its peers.
        """
        kind = self.failure.kind
        echo = 2 if kind is FailureClass.PEER_ABORT else int(kind in ECHOES)
        return (echo, self.failure.at_ms, self.ended_at_ms, self.failure.local_rank)


def first_failure_of(group: WorkerGroup, facts: Facts) -> Failure | None:
    """Return the first failure of a worker group, or None if no worker failed.

    Without a stop in progress, every exit except code 0 is a failure. During a stop for a failure,
    only a worker's own error counts: that error may have aborted its peers before its own exit.
    Exits during any other stop are not failures. Failures are ordered by the time in the error
    file, or else by the exit time.
    """
    candidates = [s for ended in group.exits if (s := _candidate(group, facts, ended)) is not None]
    if not candidates:
        return None
    candidates.extend(_still_ending(group, facts))
    return min(candidates, key=_Candidate.order).failure


def _candidate(group: WorkerGroup, facts: Facts, ended: WorkerEnded) -> _Candidate | None:
    exit_ = ended.exit
    if ended.during is StopCause.HANG and exit_.signal is not None:
        return _hanging(group, facts, ended)
    if exit_.exit_code == 0 or ended.during not in _CAUSES:
        return None
    report = from_error_file(group.reports.get(exit_.local_rank, b""))
    if ended.during is None:
        uncaught = exit_.exit_code == UNCAUGHT
        error_report = report or from_stderr(exit_.stderr_tail, final_only=not uncaught)
        return _record(group, facts, ended, exit_.local_rank, error_report)
    killed = exit_.signal is not None or exit_.exit_code == ENDED_ON_TERM
    error_report = report or from_stderr(exit_.stderr_tail, final_only=killed)
    if error_report is None:
        return None
    if exit_.signal == SIGKILL:  # sent by us: the worker was about to exit by itself
        ended = replace(ended, exit=replace(exit_, signal=None))
    suspect = _record(group, facts, ended, exit_.local_rank, error_report)
    return None if suspect.failure.kind in ECHOES else suspect


def _hanging(group: WorkerGroup, facts: Facts, ended: WorkerEnded) -> _Candidate:
    """Return the failure of a worker that dumped its stack; its last progress gives the order.

    A worker whose collective aborted in the meantime, because its peer was stopped sooner, reports
    its own error instead. If that error is not written yet, the worker counts as one that waited.
    """
    exit_ = ended.exit
    before = before_dump(exit_.stderr_tail)
    report = from_error_file(group.reports.get(exit_.local_rank, b"")) or from_stderr(before, True)
    if report is not None:
        return _record(group, facts, ended, exit_.local_rank, report)
    progress = group.progress.get(exit_.local_rank)
    at = parse_stack(exit_.stderr_tail)
    step = last_step(group) if progress is None else progress.step
    fact = f"no progress for {facts.hang_seconds:g} s" + (f" after step {step}" * (step >= 0))
    if at is None:
        where = "it did not report its place"
    elif at.after_program:
        where = "its program had ended"
    elif at.waits:
        where = f"it waited for its peers in {at.place}"
    else:
        where = f"it was in {at.place}"
    error_report = ErrorReport(
        message=f"{fact}: {where}",
        traceback="" if at is None else at.traceback,
        at_ms=progress.at_ms if progress is not None and progress.at_ms else None,
    )
    found = _record(group, facts, ended, exit_.local_rank, error_report)
    waits = at is not None and (at.waits or at.after_program)
    kind = FailureClass.COLLECTIVE_TIMEOUT if waits else FailureClass.HANG
    return replace(found, failure=replace(found.failure, kind=kind))


def _still_ending(group: WorkerGroup, facts: Facts) -> Iterator[_Candidate]:
    """Yield workers that wrote an error file and have not exited yet."""
    over = {ended.exit.local_rank for ended in group.exits}
    for local_rank, raw in group.reports.items():
        error_report = from_error_file(raw)
        if local_rank not in over and error_report is not None:
            yield _record(group, facts, None, local_rank, error_report)


def _record(
    group: WorkerGroup,
    facts: Facts,
    ended: WorkerEnded | None,
    local_rank: int,
    error_report: ErrorReport | None,
) -> _Candidate:
    exit_ = None if ended is None else ended.exit
    rank = UNKNOWN_RANK if group.base_rank is None else group.base_rank + local_rank
    ended_at_ms = 0 if exit_ is None else exit_.at_unix_ms
    failure = Failure(
        round=group.round,
        member=facts.member,
        name=facts.name,
        rank=rank,
        local_rank=local_rank,
        kind=failure_class(exit_, error_report, rank),
        at_ms=ended_at_ms
        if error_report is None or error_report.at_ms is None
        else error_report.at_ms,
        exit_code=None if exit_ is None else exit_.exit_code,
        signal=None if exit_ is None else exit_.signal,
        message=_message(ended, error_report),
        traceback=_traceback(exit_, error_report),
        node=facts.node,
        step=_step(group, local_rank),
        describes_exit=error_report is None and exit_ is not None and not exit_.message,
    )
    return _Candidate(fit_to_limit(failure), ended_at_ms)


def _step(group: WorkerGroup, local_rank: int) -> int | None:
    """Return the last step that this worker reported."""
    progress = group.progress.get(local_rank)
    return None if progress is None or progress.step < 0 else progress.step


def _message(ended: WorkerEnded | None, error_report: ErrorReport | None) -> str:
    if error_report is not None:
        return error_report.message
    if ended is None:
        return ""
    if ended.exit.message:
        return ended.exit.message
    how, tail = ending_text(ended.exit), before_dump(ended.exit.stderr_tail)
    words = last_line(tail) if ended.exit.signal in (None, SIGABRT) else ""
    text = f"{how}; the last line on its standard error: {words}" if words else how
    at = parse_stack(ended.exit.stderr_tail) if ended.exit.signal in CRASHES else None
    return text if at is None else f"{text}; it was in {at.place}"


def _traceback(exit_: WorkerExited | None, error_report: ErrorReport | None) -> str:
    if error_report is not None:
        return error_report.traceback
    at = None if exit_ is None or exit_.signal not in CRASHES else parse_stack(exit_.stderr_tail)
    return "" if at is None else at.traceback


def fit_to_limit(failure: Failure) -> Failure:
    """Return the failure cut to the storage limit: message from the start, traceback to the end."""
    failure = replace(
        failure,
        message=_cut_end(failure.message, MESSAGE_CHARACTERS),
        traceback=_cut_start(failure.traceback, FAILURE_BYTES),
    )
    while len(encode(failure)) > FAILURE_BYTES and failure.traceback:
        failure = replace(
            failure, traceback=_cut_start(failure.traceback, len(failure.traceback) // 2)
        )
    while len(encode(failure)) > FAILURE_BYTES and failure.message:
        failure = replace(failure, message=_cut_end(failure.message, len(failure.message) // 2))
    return failure


def _cut_end(text: str, limit: int) -> str:
    clean = encodable(text)
    return clean if len(clean) <= limit else clean[: max(0, limit - 1)] + "…" * (limit > 0)


def _cut_start(text: str, limit: int) -> str:
    clean = encodable(text)
    return clean if len(clean) <= limit else "…" * (limit > 0) + clean[len(clean) - limit + 1 :]
