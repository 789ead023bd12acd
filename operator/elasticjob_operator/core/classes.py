"""Meaning and remedy of each failure class. docs/explain.md repeats them."""

from __future__ import annotations

from collections.abc import Mapping

from elasticjob_operator.core.vocabulary import Words
from elasticjob_operator.model.status import FirstFailure
from elasticjob_rendezvous.core.failures import STACK_HEADER, FailureClass

CLASSES: Mapping[str, Words] = {
    FailureClass.USER_ERROR: Words(
        "the training script failed",
        "Correct the script: its traceback is in status.firstFailure, its whole output in the "
        "pod's log",
    ),
    FailureClass.HOST_OUT_OF_MEMORY: Words(
        "the machine's memory ran out",
        "Give the container more memory, or /dev/shm if shared memory is named, or use fewer "
        "data loaders or a smaller batch",
    ),
    FailureClass.CUDA_OUT_OF_MEMORY: Words(
        "the GPU's memory ran out",
        "Use a smaller batch or a GPU with more memory, or see what else runs on it",
    ),
    FailureClass.OUT_OF_MEMORY: Words(
        "memory ran out",
        "Use a smaller batch, or give the container or its GPU more memory",
    ),
    FailureClass.COLLECTIVE_TIMEOUT: Words(
        "it timed out waiting for a peer",
        "Look at what the other ranks did at that time: one hung, or was slower than the timeout "
        "of the process group. If recovery.hangTimeoutSeconds is below that timeout, and steps "
        "are reported, that rank is found and named",
    ),
    FailureClass.HANG: Words(
        "it hung, and not because it waited for a peer",
        "See where it hung: the stacks of all ranks are in the pods' logs",
    ),
    FailureClass.PEER_ABORT: Words(
        "its connection to a peer broke, and no node is known to have left",
        "Look at the logs of the other ranks at that time: one of them ended first",
    ),
    FailureClass.SIGNAL: Words(
        "a signal ended it",
        "See the end of the pod's log",
    ),
    FailureClass.LAUNCH_ERROR: Words(
        "the workers could not be started",
        "Correct the command or the image",
    ),
    FailureClass.MASTER_PORT: Words(
        "the port of rank 0 was taken by another program",
        "The round is retried with another port; with hostNetwork avoid fixed ports",
    ),
    FailureClass.NODE_LOST: Words(
        "it disappeared without reporting an error, for example because its node was lost",
        "Check that machine; another pod takes its place, and no restart is charged",
    ),
    FailureClass.PREEMPTED: Words(
        "the cluster needed its resources for other pods",
        "Give the job a higher priority or machines of its own; another pod takes its place, and "
        "no restart is charged",
    ),
}
"""Meaning and remedy by class. A class that is absent here comes from a newer agent."""
UNCHARGED = (FailureClass.NODE_LOST, FailureClass.PREEMPTED)
"""Classes of lost or preempted nodes: none of their workers failed."""
UNKNOWN_CLASS = Words("a worker failed", "See the pod's log")
_CRASHED = "Native code crashed: see the end of the pod's log"
_SENT = (
    "Another process sent that signal: a program in the image, a script around the command, or a "
    "user on that machine"
)
_LIMITED = "It reached a limit of its container (ulimit): raise that limit"
_CRASHES = (4, 6, 8, 11)
_OF_SIGNALS: Mapping[int, str] = {
    **dict.fromkeys(_CRASHES, _CRASHED),
    1: _SENT,
    2: _SENT,
    3: _SENT,
    7: "Give /dev/shm more room, if it was full, or the disk of a file that it had mapped; else "
    "native code crashed: see the end of the pod's log",
    9: "Something on that machine killed it, but not the memory limit of its container: see that "
    "machine's log",
    15: _SENT,
    24: _LIMITED,
    25: _LIMITED,
}


def meaning(failure: FirstFailure) -> str:
    """Return the meaning of a failure, without a full stop."""
    if failure.class_ == FailureClass.SIGNAL and failure.signal is failure.exit_code is None:
        return "its workers were ended from outside"
    return CLASSES.get(failure.class_, UNKNOWN_CLASS).meaning


def remedy(failure: FirstFailure) -> str:
    """Return the remedy of a failure, without a full stop."""
    told = bool(failure.traceback)
    # A shell reports a signal that ended its command as exit code 128 + signal.
    signum = failure.signal or (failure.exit_code or 0) - 128
    of_signal = _OF_SIGNALS.get(signum)
    match failure.class_:
        case FailureClass.USER_ERROR if not told:
            return "Correct the script: its whole output is in the pod's log"
        case FailureClass.SIGNAL if of_signal is not None:
            unsaid = signum in _CRASHES and not told
            more = ", and set PYTHONFAULTHANDLER=1 to see where" if unsaid else ""
            return of_signal + more
        case FailureClass.COLLECTIVE_TIMEOUT if failure.traceback.startswith(STACK_HEADER):
            return (
                "Compare the stacks of all ranks, which are in the pods' logs: the ranks call "
                "collectives in different orders, or their network loses data"
            )
    return CLASSES.get(failure.class_, UNKNOWN_CLASS).remedy
