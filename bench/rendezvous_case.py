"""One case of the rendezvous benchmark: N members, each a forked process, released together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from bench.forked import CaseFailed, Live, Send, forked

__all__ = ["CaseFailed", "CaseResult", "Report", "WrongRendezvous", "run_case", "verify"]


class Info(Protocol):
    """Result of next_rendezvous() of every handler, torch's and ours."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...


class Handler(Protocol):
    def next_rendezvous(self) -> Info: ...


AFTERMATH_SECONDS = 0.5
"""Time after the last rank during which requests are counted, to include deferred ones."""

# Called in the member's own process with its index.
HandlerFactory = Callable[[int], Handler]


class WrongRendezvous(Exception):
    """Rendezvous that completed with inconsistent ranks or sizes."""


@dataclass(frozen=True, slots=True)
class Report:
    """One member's outcome; `at` is on the machine's monotonic clock."""

    rank: int
    world: int
    at: float
    cpu_seconds: float


@dataclass(frozen=True, slots=True)
class CaseResult:
    wall_seconds: float  # from the start signal until the last member has its rank
    cpu_seconds: float  # of all members together
    requests: Mapping[str, int] | None  # by method, the aftermath included; None: no etcd


def verify(reports: Sequence[Report], members: int) -> None:
    """Raise WrongRendezvous unless ranks are a bijection onto 0..N-1 and every world is N."""
    ranks = sorted(report.rank for report in reports)
    if ranks != list(range(members)):
        raise WrongRendezvous(f"ranks of {members} members are not 0..{members - 1}: {ranks}")
    if sizes := {report.world for report in reports} - {members}:
        raise WrongRendezvous(f"{members} members got world sizes {sorted(sizes)}")


def run_case(
    members: int,
    make: HandlerFactory,
    requests: Callable[[], Counter[str]] | None,
    limit_seconds: float,
    log: Path,
    with_making: bool = False,
) -> CaseResult:
    """Fork the members, release them, and wait until each has its rank.

    Times `next_rendezvous` of connected handlers; `with_making` includes their creation.
    Raises CaseFailed after the limit or at a member's first error, WrongRendezvous for bad ranks.
    """
    with forked(members, _member(make, with_making), log) as processes:
        processes.take(members, time.monotonic() + limit_seconds)  # each reports that it is ready
        before = requests() if requests else Counter[str]()
        began = processes.release()
        lines = processes.take(members, began + limit_seconds)
        spent = None
        if requests:
            time.sleep(AFTERMATH_SECONDS)
            spent = dict(requests() - before)
    reports = [Report(**line) for line in lines]
    verify(reports, members)
    wall = max(report.at for report in reports) - began
    return CaseResult(wall, sum(report.cpu_seconds for report in reports), spent)


def _member(make: HandlerFactory, with_making: bool) -> Live:
    """Return the main function of one member's process."""

    def live(index: int, wait_for_start: Callable[[], None], send: Send) -> object:
        handler = None if with_making else make(index)
        send({})
        wait_for_start()
        began_cpu = time.process_time()
        handler = handler or make(index)
        info = handler.next_rendezvous()
        at, spent = time.monotonic(), time.process_time() - began_cpu
        send(asdict(Report(info.rank, info.world_size, at, spent)))
        return handler, info

    return live
