"""The class of one worker's failure, from its exit and its last words.

The patterns are what torch 2.13 with gloo, NCCL and its TCP store really prints
when a peer goes, a port is taken or memory runs out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from elasticjob_agent.core.evidence import ABORTED_AT_EXIT, Account
from elasticjob_agent.hands import WorkerExited
from elasticjob_rendezvous.core.records import FailureClass

NOT_EXECUTABLE, NOT_FOUND = 126, 127
SIGABRT, SIGKILL = 6, 9

SIGNALS: Mapping[int, str] = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS",
    8: "SIGFPE", 9: "SIGKILL", 10: "SIGUSR1", 11: "SIGSEGV", 12: "SIGUSR2", 13: "SIGPIPE",
    14: "SIGALRM", 15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS",
}  # fmt: skip
"""Linux' numbers: a worker runs on Linux, wherever this is read."""

_MASTER_PORT = re.compile(r"server socket has failed to (?:listen|bind).*EADDRINUSE", re.DOTALL)
_OUT_OF_MEMORY = re.compile(
    r"^(?:[\w.]*OutOfMemoryError|MemoryError|[\w.]*ArrayMemoryError)\b"
    r"|CUDA out of memory|HIP out of memory|can't allocate memory|Cannot allocate memory",
    re.MULTILINE,
)
_COLLECTIVE = re.compile(
    r"gloo/transport|Connection closed by peer \[|monitoredBarrier"
    r"|DistNetworkError|DistStoreError|DistBackendError|ncclRemoteError|ncclSystemError"
    r"|NCCL communicator was aborted|Watchdog caught collective|ProcessGroupNCCL's watchdog"
)
# The system's own words for a lost peer may be about the user's socket: they count only below
# frames of torch.distributed.
_LOST_PEER = re.compile(r"Broken pipe|Connection (?:reset by peer|refused|aborted)")
_TORCH_DISTRIBUTED = re.compile(r"torch[/.]distributed|ProcessGroup")


def ending_text(exit_: WorkerExited) -> str:
    """How a worker ended, for people."""
    if exit_.signal is not None:
        return f"killed by {SIGNALS.get(exit_.signal, f'signal {exit_.signal}')}"
    return f"exit code {exit_.exit_code}"


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
    if exit_.signal == SIGABRT and _COLLECTIVE.search(exit_.stderr_tail):
        return FailureClass.PEER_ABORT  # NCCL's watchdog ends the process from a thread of its own
    if exit_.signal == SIGABRT and account is not None and ABORTED_AT_EXIT in exit_.stderr_tail:
        return FailureClass.USER_ERROR  # its exception was there first
    if exit_.signal is not None:
        return FailureClass.SIGNAL
    if exit_.exit_code in (NOT_EXECUTABLE, NOT_FOUND):
        return FailureClass.LAUNCH_ERROR
    return FailureClass.USER_ERROR


def _by_words(account: Account, rank: int) -> FailureClass | None:
    said = account.message
    if _MASTER_PORT.search(said):
        return FailureClass.MASTER_PORT if rank == 0 else FailureClass.USER_ERROR
    if _OUT_OF_MEMORY.search(said):
        return FailureClass.OUT_OF_MEMORY
    if _COLLECTIVE.search(said):
        return FailureClass.PEER_ABORT
    if _LOST_PEER.search(said) and _TORCH_DISTRIBUTED.search(f"{said}\n{account.traceback}"):
        return FailureClass.PEER_ABORT
    return None
