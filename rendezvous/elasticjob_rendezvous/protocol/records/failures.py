"""Record of a worker's failure, written by its agent, and the failure classes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elasticjob_rendezvous.protocol.records.codec import prepare


class FailureClass(StrEnum):
    USER_ERROR = "UserError"
    HOST_OUT_OF_MEMORY = "HostOutOfMemory"
    CUDA_OUT_OF_MEMORY = "CudaOutOfMemory"
    OUT_OF_MEMORY = "OutOfMemory"  # of agents that did not distinguish host from device
    COLLECTIVE_TIMEOUT = "CollectiveTimeout"  # a collective waited too long for a peer
    HANG = "Hang"  # no progress, and no wait for a peer explains it
    PEER_ABORT = "PeerAbort"  # a collective broke because a peer was gone
    SIGNAL = "Signal"
    LAUNCH_ERROR = "LaunchError"
    MASTER_PORT = "MasterPort"  # rank 0 could not bind; re-formed uncharged
    NODE_LOST = "NodeLost"  # seen from outside only: no agent is left to write it
    PREEMPTED = "Preempted"  # seen from outside only: the cluster took the pod's place

    @classmethod
    def _missing_(cls, value: object) -> FailureClass | None:
        """Map a class that only a newer release knows to a charged one: a worker did fail."""
        return cls.USER_ERROR if isinstance(value, str) else None


ECHOES = frozenset({FailureClass.PEER_ABORT, FailureClass.COLLECTIVE_TIMEOUT})
"""Failures that show by themselves that a peer went, or hung, first."""


FAILURE_BYTES = 8 * 1024
STACK_HEADER = "Stack (most recent call last):"
"""First line of a traceback that is the stack of a hanging worker."""


def exit_text(code: int | None) -> str:
    """Return the begin of the message of a worker that exited and left no error."""
    return f"exit code {code}"


@dataclass(frozen=True, slots=True)
class Failure:
    """First failed worker of one member in one round. `at_ms` only orders culprits.

    `step` is the last step that it reported, `ran_ms` its running time; None if unknown.
    `describes_exit` is True if the message describes the exit of a worker that left no error; None
    in records of the previous release and in those rebuilt from a status.
    """

    round: int
    member: str
    name: str
    rank: int
    local_rank: int
    kind: FailureClass
    at_ms: int
    exit_code: int | None = None
    signal: int | None = None
    message: str = ""
    traceback: str = ""
    node: str = ""
    step: int | None = None
    ran_ms: int | None = None
    describes_exit: bool | None = None


prepare(Failure)
