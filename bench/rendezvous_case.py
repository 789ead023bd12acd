"""One case of the rendezvous benchmark: N members, a forked process each, released all at once."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.processes import die_with_parent


class Info(Protocol):
    """What every handler's next_rendezvous() returns, torch's and ours."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...


class Handler(Protocol):
    def next_rendezvous(self) -> Info: ...


AFTERMATH_SECONDS = 0.5
"""Requests are counted until so long after the last rank: what members put off counts too."""

# Called in the member's own process with its index.
HandlerFactory = Callable[[int], Handler]


class CaseFailed(Exception):
    """The members of a case did not all get a rank in time; the text says why."""


class WrongRendezvous(Exception):
    """A rendezvous came to an end with ranks or sizes that no gang could train with."""


@dataclass(frozen=True, slots=True)
class Report:
    """One member's outcome; `at` is on the clock that all processes of a machine share."""

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
        raise WrongRendezvous(f"{members} members were told of worlds of {sorted(sizes)}")


def run_case(
    members: int,
    make: HandlerFactory,
    requests: Callable[[], Counter[str]] | None,
    limit_seconds: float,
    log: Path,
    with_making: bool = False,
) -> CaseResult:
    """Fork the members, release them, and wait until each has its rank.

    What is timed is `next_rendezvous` of handlers that have been made and are connected;
    `with_making` times making them too.
    Raises CaseFailed after the limit or at a member's first error, WrongRendezvous for bad ranks.
    """
    start_read, start_write = os.pipe()
    report_read, report_write = os.pipe()
    pids: list[int] = []
    try:
        for index in range(members):
            pid = os.fork()
            if pid == 0:
                os.close(start_write)
                _member(index, make, start_read, report_write, log, with_making)
            pids.append(pid)
        lines = _Lines(report_read, time.monotonic() + limit_seconds)
        lines.take(members)  # each says that it is there
        before = requests() if requests else Counter[str]()
        began = time.monotonic()
        lines.deadline = began + limit_seconds
        os.close(start_write)  # the end of file is the start signal: it reaches all at once
        start_write = -1
        reports = [_parsed(line) for line in lines.take(members)]
        spent = None
        if requests:
            time.sleep(AFTERMATH_SECONDS)
            spent = dict(requests() - before)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the number is still theirs
        for pid in pids:
            os.waitpid(pid, 0)
        for descriptor in (start_read, report_read, report_write, start_write):
            if descriptor >= 0:
                os.close(descriptor)
    verify(reports, members)
    wall = max(report.at for report in reports) - began
    return CaseResult(wall, sum(report.cpu_seconds for report in reports), spent)


def _member(
    index: int, make: HandlerFactory, start: int, report: int, log: Path, with_making: bool
) -> None:
    """The whole life of a member's process; it never returns."""
    with suppress(BaseException):  # a forked child must not unwind into its parent's frames
        die_with_parent()
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            handler = None if with_making else make(index)
            os.write(report, b"{}\n")
            os.read(start, 1)
            began_cpu = time.process_time()
            info = (handler or make(index)).next_rendezvous()
            outcome: dict[str, object] = {
                "rank": info.rank,
                "world": info.world_size,
                "at": time.monotonic(),
                "cpu_seconds": time.process_time() - began_cpu,
            }
        except BaseException as error:
            outcome = {"error": f"{type(error).__name__}: {error}"[:500]}
        # Less than PIPE_BUF: lines of different members do not mix.
        os.write(report, json.dumps(outcome).encode() + b"\n")
        signal.pause()  # stay, with the handler's keep-alives, until the case is over
    os._exit(1)


def _parsed(line: str) -> Report:
    content = json.loads(line)
    if error := content.get("error"):
        raise CaseFailed(error)
    return Report(**content)


class _Lines:
    """Lines from the members' common pipe, until a deadline on the monotonic clock."""

    def __init__(self, descriptor: int, deadline: float) -> None:
        self.deadline = deadline
        self._descriptor = descriptor
        self._rest = b""

    def take(self, count: int) -> list[str]:
        lines: list[str] = []
        while len(lines) < count:
            line, found, rest = self._rest.partition(b"\n")
            if found:
                self._rest = rest
                lines.append(line.decode())
                if b'"error"' in line:  # no need to wait for the others: they may wait for this one
                    _parsed(lines[-1])
                continue
            remaining = self.deadline - time.monotonic()
            if remaining <= 0 or not select.select([self._descriptor], [], [], remaining)[0]:
                raise CaseFailed(f"only {len(lines)} of {count} members got through in time")
            self._rest += os.read(self._descriptor, 65536)
        return lines
