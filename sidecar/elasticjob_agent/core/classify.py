"""The class of one worker's failure, from its exit and its last words.

The patterns are what torch 2.13 with gloo, NCCL and its TCP store really prints
when a peer goes, a port is taken or memory runs out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from elasticjob_agent.core.evidence import ABORTED_AT_EXIT, Account
from elasticjob_agent.hands import WorkerExited
from elasticjob_rendezvous.core.failures import FailureClass

NOT_EXECUTABLE, NOT_FOUND = 126, 127
SIGABRT, SIGKILL = 6, 9

SIGNALS: Mapping[int, str] = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS",
    8: "SIGFPE", 9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE",
    14: "SIGALRM", 15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS",
}  # fmt: skip
"""Linux' numbers: a worker runs on Linux, wherever this is read."""

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
# The system's own words for a lost peer may be about the user's socket: they count only below
# frames of torch.distributed.
_LOST_PEER = re.compile(r"Broken pipe|Connection (?:reset by peer|refused|aborted)")
# Not its launcher's: a script's own decorator runs below that.
_TORCH_DISTRIBUTED = re.compile(r"torch[/.]distributed(?![/.](?:elastic|run|launch))|ProcessGroup")


SHELLS = 128
"""What a shell adds to the signal that ended its last command."""
CRASHES = frozenset({4, 6, 7, 8, 11})
"""Signals that the code of the worker itself brings about, and Python's faulthandler tells of."""


def ending_text(exit_: WorkerExited) -> str:
    """How a worker ended, for people."""
    if exit_.signal is not None:
        return f"killed by {SIGNALS.get(exit_.signal, f'signal {exit_.signal}')}"
    within = signal_within(exit_)
    told = "" if within is None else f": a command in it was killed by {SIGNALS[within]}"
    return f"exit code {exit_.exit_code}{told}"


def signal_within(exit_: WorkerExited) -> int | None:
    """The signal that ended a command in it, where a shell made an exit code of that."""
    signum = (exit_.exit_code or 0) - SHELLS
    return signum if signum in SIGNALS else None


def classified(exit_: WorkerExited | None, account: Account | None, rank: int) -> FailureClass:
    """The class, from the most telling sign to the least.

    Args:
        exit_: None when the worker still runs and only its error file is known.
        account: what the worker said, if it said something.
        rank: the global rank: only rank 0 listens at MASTER_PORT.
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
        # C++ ended the process, as NCCL's watchdog does from a thread of its own.
        if by_text := _by_text(exit_.stderr_tail, False):
            return by_text
        if account is not None and ABORTED_AT_EXIT in exit_.stderr_tail:
            return FailureClass.USER_ERROR  # its exception was there first
    if exit_.signal is not None or within is not None:
        return FailureClass.SIGNAL
    if exit_.exit_code in (NOT_EXECUTABLE, NOT_FOUND):
        return FailureClass.LAUNCH_ERROR
    return FailureClass.USER_ERROR


def _by_words(account: Account, rank: int) -> FailureClass | None:
    """What the exception tells, or else the nearest of its causes that tells something."""
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
    """What these words tell; some tell it only when torch.distributed says them."""
    if _DEVICE_MEMORY.search(said):
        return FailureClass.CUDA_OUT_OF_MEMORY
    if _HOST_MEMORY.search(said):
        return FailureClass.HOST_OUT_OF_MEMORY
    collective = _COLLECTIVE.search(said) is not None
    if (collective or of_torch) and _TIMED_OUT.search(said):
        return FailureClass.COLLECTIVE_TIMEOUT
    return FailureClass.PEER_ABORT if collective else None


def _helper_killed(exit_: WorkerExited, account: Account | None) -> bool:
    """Whether it was not the worker that was killed, but a process that it had started."""
    if account is None:
        return _HELPER_KILLED.search(exit_.stderr_tail) is not None
    said = (account.message, *(cause.message for cause in account.causes))
    return any(_HELPER_KILLED.search(each) for each in said)
