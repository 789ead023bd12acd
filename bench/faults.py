"""The faults that a gang of four is put through; each leaves the next one the gang it needs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import assert_never

from bench import processes
from bench.gang import Gang, NotRecovered, gang
from bench.peers.commands import Peer

GANG_SIZE = 4


class Fault(StrEnum):
    """In this order one gang serves all: 4 agents, 4, 3, 4, 3."""

    START = "start"
    WORKER_KILLED = "worker-killed"
    DRAIN = "drain"
    JOIN = "join"
    NODE_KILLED = "node-killed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Either the seconds away, or why there is no number."""

    seconds: float | None
    error: str | None = None


def run_peer(
    peer: Peer, faults: Sequence[Fault], limit_seconds: float, logs: Path, turn: int
) -> Iterator[tuple[Fault, Outcome]]:
    """Put one peer through the faults; one that it does not survive gets it a fresh gang.

    A gang that cannot even start ends it: all that was still to come has that for its outcome.
    """
    rest = [fault for fault in Fault if fault in faults]
    with ExitStack() as stack:
        current: Gang | None = None
        while rest:
            if current is None or _too_small(current, rest[0]):
                stack.close()
                current = stack.enter_context(gang(peer, logs, turn))
                started = _outcome(current, Fault.START, limit_seconds)
                if started.error:
                    yield from ((fault, started) for fault in rest)
                    return
                if rest[0] is Fault.START:
                    yield rest.pop(0), started
                    continue
            outcome = _outcome(current, rest[0], limit_seconds)
            if outcome.error:
                current = None
            yield rest.pop(0), outcome


def _outcome(current: Gang, fault: Fault, limit_seconds: float) -> Outcome:
    try:
        if fault is not Fault.START:
            current.wait_until_calm(limit_seconds)
        return Outcome(_apply(current, fault, limit_seconds))
    except NotRecovered as failure:
        return Outcome(None, str(failure))


def _too_small(current: Gang, fault: Fault) -> bool:
    """Whether the fault needs a member more; only a join finds one missing just right."""
    return len(current.agents) < GANG_SIZE and fault is not Fault.JOIN


def _apply(current: Gang, fault: Fault, limit_seconds: float) -> float:
    """Do it, to the newest member where it takes a victim; return the seconds until recovery."""
    victim = max(current.agents, default=0)
    since = time.monotonic()
    match fault:
        case Fault.START:
            for _ in range(GANG_SIZE):
                current.start_agent()
        case Fault.WORKER_KILLED:
            processes.kill(current.worker(victim).pid)
        case Fault.DRAIN:
            current.drain(victim)
        case Fault.JOIN:
            current.start_agent()
        case Fault.NODE_KILLED:
            current.kill_node(victim)
        case _:
            assert_never(fault)
    return current.seconds_to_recover(since, limit_seconds)
