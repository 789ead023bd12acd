"""Failure class of a worker, from its exit and its error output.

The patterns match the output of torch 2.13 with gloo, NCCL and its TCP store when a peer is
lost, a port is in use or memory runs out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from elasticjob_agent.core.evidence import ABORTED_AT_EXIT, Account
from elasticjob_agent.hands import WorkerExited
from elasticjob_rendezvous.core.failures import FailureClass, exit_text

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
    told = "" if within is None else f": a command in it was killed by {SIGNALS[within]}"
    return f"{exit_text(exit_.exit_code)}{told}"


def signal_within(exit_: WorkerExited) -> int | None:
    """Return the signal that killed a command in the worker's shell, from the exit code."""
    signum = (exit_.exit_code or 0) - SHELLS
    return signum if signum in SIGNALS else None


def classified(exit_: WorkerExited | None, account: Account | None, rank: int) -> FailureClass:
    """Return the failure class, checking the most specific evidence first.

    Args:
        exit_: None if the worker still runs and only its error file is known.
        account: the worker's own error report, if any.
        rank: the global rank; only rank 0 listens at MASTER_PORT.
    """
    if account is not None:
        by_words = _by_words(account, rank)
        if by_words is not None:
            return by_words
    if exit_ is None:
        return FailureClass.USER_ERROR
    within = None if account is not None else signal_within(exit_)
    killed = SIGKILL in (exit_.signal, within)
    if exit_.out_of_memory and (killed or _helper_killed(exit_, account)):
        return FailureClass.HOST_OUT_OF_MEMORY
    if exit_.signal == SIGABRT:
        # C++ aborted the process, as NCCL's watchdog does from its own thread.
        if by_text := _by_text(exit_.stderr_tail, False):
            return by_text
        if account is not None and ABORTED_AT_EXIT in exit_.stderr_tail:
            return FailureClass.USER_ERROR  # the exception preceded the abort
    if exit_.signal is not None or within is not None:
        return FailureClass.SIGNAL
    if exit_.exit_code in (NOT_EXECUTABLE, NOT_FOUND):
        return FailureClass.LAUNCH_ERROR
    return FailureClass.USER_ERROR


def _by_words(account: Account, rank: int) -> FailureClass | None:
    """Return the class that the exception, or else its nearest conclusive cause, indicates."""
    told = [(account.message, account.own or account.traceback)]
    told += [(cause.message, cause.own) for cause in account.causes]
    kinds = (_by_said(said, traceback, rank) for said, traceback in told)
    return next((kind for kind in kinds if kind is not None), None)


def _by_said(said: str, traceback: str, rank: int) -> FailureClass | None:
    if _MASTER_PORT.search(said):
        return FailureClass.MASTER_PORT if rank == 0 else FailureClass.USER_ERROR
    of_torch = _TORCH_DISTRIBUTED.search(f"{said}\n{traceback}") is not None
    if by_text := _by_text(said, of_torch):
        return by_text
    return FailureClass.PEER_ABORT if of_torch and _LOST_PEER.search(said) else None


def _by_text(said: str, of_torch: bool) -> FailureClass | None:
    """Return the class that a message indicates; some patterns count only in torch.distributed."""
    if _DEVICE_MEMORY.search(said):
        return FailureClass.CUDA_OUT_OF_MEMORY
    if _HOST_MEMORY.search(said):
        return FailureClass.HOST_OUT_OF_MEMORY
    collective = _COLLECTIVE.search(said) is not None
    if (collective or of_torch) and _TIMED_OUT.search(said):
        return FailureClass.COLLECTIVE_TIMEOUT
    return FailureClass.PEER_ABORT if collective else None


def _helper_killed(exit_: WorkerExited, account: Account | None) -> bool:
    """Return True if a child process of the worker was killed, not the worker itself."""
    if account is None:
        return _HELPER_KILLED.search(exit_.stderr_tail) is not None
    said = (account.message, *(cause.message for cause in account.causes))
    return any(_HELPER_KILLED.search(each) for each in said)
