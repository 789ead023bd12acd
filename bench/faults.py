"""Faults injected into a gang; each leaves the gang in the state the next one needs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import assert_never

from bench import processes
from bench.gang import Gang, NotRecovered, gang
from bench.peers.commands import Peer
from bench.split import split


class Fault(StrEnum):
    """Faults in order. One gang serves all but the last: N, N, N - 1, N, N - 1, N - 1 agents."""

    START = "start"
    WORKER_KILLED = "worker-killed"
    DRAIN = "drain"
    JOIN = "join"
    NODE_KILLED = "node-killed"
    NODE_SILENT = "node-silent"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Recovery time in seconds, or an error instead.

    Args:
        pause: part of it without training, if there was training before.
        split: seconds of each phase, as our rendezvous recorded them.
    """

    seconds: float | None
    error: str | None = None
    pause: float | None = None
    split: Mapping[str, float] = field(default_factory=dict)


def run_peer(
    peer: Peer, size: int, faults: Sequence[Fault], limit_seconds: float, logs: Path, turn: int
) -> Iterator[tuple[Fault, Outcome]]:
    """Inject the faults into a gang of one peer; start a fresh gang after one it does not survive.

    If a gang cannot start, that error is the outcome of all remaining faults.
    """
    rest = [fault for fault in Fault if fault in faults]
    with ExitStack() as stack:
        current: Gang | None = None
        while rest:
            if current is None or (len(current.agents) < size and rest[0] is not Fault.JOIN):
                stack.close()
                current = stack.enter_context(gang(peer, logs, f"{size}-{turn}"))
                started = _outcome(current, Fault.START, size, limit_seconds)
                if started.error:
                    yield from ((fault, started) for fault in rest)
                    return
                if rest[0] is Fault.START:
                    yield rest.pop(0), started
                    continue
            outcome = _outcome(current, rest[0], size, limit_seconds)
            if outcome.error:
                current = None
            yield rest.pop(0), outcome


def _outcome(current: Gang, fault: Fault, size: int, limit_seconds: float) -> Outcome:
    try:
        if fault is not Fault.START:
            current.wait_until_stable(limit_seconds)
        before = current.workers()
        since = time.monotonic()
        _apply(current, fault, size)
        at = current.recovered_at(since, limit_seconds)
    except NotRecovered as failure:
        return Outcome(None, str(failure))
    phases = split(current.endpoint) if current.peer.ours else {}
    return Outcome(at - since, None, current.pause(before, at), phases)


def _apply(current: Gang, fault: Fault, size: int) -> None:
    """Inject the fault, into the newest member if it needs a victim."""
    victim = max(current.agents, default=0)
    match fault:
        case Fault.START:
            for _ in range(size):
                current.start_agent()
        case Fault.WORKER_KILLED:
            processes.kill(current.worker(victim).pid)
        case Fault.DRAIN:
            current.drain(victim)
        case Fault.JOIN:
            current.start_agent()
        case Fault.NODE_KILLED:
            current.kill_node(victim)
        case Fault.NODE_SILENT:
            current.silence_node(victim)
        case _:
            assert_never(fault)
