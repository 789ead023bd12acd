"""Cost of one round in gangs of up to a thousand members: `python -m bench.crowd`.

Measures requests and CPU time per member. Members share processes: one process each would measure
the machine's memory instead of the protocol. The numbers go to build/bench/crowd.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench import etcd_proc
from bench.backends import preload
from bench.etcd_proc import EtcdFailed
from bench.forked import CaseFailed, Live, Send, forked
from bench.machine import machine_facts
from bench.processes import processor_seconds
from bench.rendezvous_case import AFTERMATH_SECONDS, Report, verify
from bench.results import keep
from bench.settings import OUR_ETCD_VERSION, OUTPUT, ProgramMissing, etcd_binary, fresh_id
from elasticjob_rendezvous.api import RendezvousParameters
from elasticjob_rendezvous.etcd.member import RendezvousMember
from elasticjob_rendezvous.etcd.parameters import member_settings
from elasticjob_rendezvous.protocol.directives import Run
from elasticjob_rendezvous.protocol.worker_group import Local

SIZES = (64, 256, 512, 1024)
MOST_REQUESTS = 8.0
"""Promised maximum of requests per member and round."""
CONNECT_SECONDS = 60.0
PATIENCE_SECONDS = 30.0
"""Timeout of leases and confirmations: members that share few CPUs starve each other."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one round, from the moment when all members were ready."""

    members: int
    processes: int
    wall_seconds: float  # until the last member has its rank
    cpu_seconds: float  # of all members together
    etcd_cpu_seconds: float
    requests: Mapping[str, int]  # by method, the aftermath included

    @property
    def requests_per_member(self) -> float:
        return round(sum(self.requests.values()) / self.members, 2)


def measure(members: int, processes: int, limit_seconds: float, log: Path) -> Cost:
    """Measure one round on its own etcd. Raises CaseFailed, or WrongRendezvous for bad ranks."""
    with contextlib.ExitStack() as stack:
        server = etcd_proc.etcd_server(etcd_binary(OUR_ETCD_VERSION), v2=False)
        etcd = stack.enter_context(server)
        live = _process(etcd.endpoint, fresh_id("crowd"), members, processes)
        gang = stack.enter_context(forked(processes, live, log))
        gang.take(processes, time.monotonic() + limit_seconds)  # all members are connected
        before, cpu = etcd.requests(), processor_seconds(etcd.pid)
        began = gang.release()
        lines = gang.take(members, began + limit_seconds)
        cpu = processor_seconds(etcd.pid) - cpu
        time.sleep(AFTERMATH_SECONDS)
        requests = dict(etcd.requests() - before)
    reports = [Report(**line) for line in lines]
    verify(reports, members)
    wall = max(report.at for report in reports) - began
    spent = sum(report.cpu_seconds for report in reports)
    return Cost(members, processes, wall, spent, cpu, requests)


def _process(endpoint: str, run_id: str, members: int, processes: int) -> Live:
    """Return the main function of one process, which hosts every `processes`-th member."""

    def live(index: int, wait_for_start: Callable[[], None], send: Send) -> None:
        names = [f"member-{name}" for name in range(index, members, processes)]
        parameters = [
            RendezvousParameters(
                "elasticjob",
                endpoint,
                run_id,
                members,
                members,
                "127.0.0.1",
                node_name=name,
                keep_alive_seconds=PATIENCE_SECONDS,
                confirm=PATIENCE_SECONDS,
            )
            for name in names
        ]
        asyncio.run(_members(parameters, wait_for_start, send))

    return live


async def _members(
    parameters: Sequence[RendezvousParameters], wait_for_start: Callable[[], None], send: Send
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        made = [RendezvousMember(member_settings(one)) for one in parameters]
        members = [await stack.enter_async_context(member) for member in made]
        connected = [member.wait_connected(CONNECT_SECONDS) for member in members]
        if not all(await asyncio.gather(*connected)):
            raise CaseFailed(f"a member could not connect within {CONNECT_SECONDS:g} s")
        send({})
        await asyncio.to_thread(wait_for_start)
        began_cpu = time.process_time()
        for member in members:
            member.report(Local(ready=True, master_port=29500))
        reports = await asyncio.gather(*[_seated(member) for member in members])
        spent = (time.process_time() - began_cpu) / len(members)
        for rank, world, at in reports:
            send(asdict(Report(rank, world, at, spent)))
        await asyncio.Event().wait()  # keep the leases alive until the case is over


async def _seated(member: RendezvousMember) -> tuple[int, int, float]:
    """Return a member's rank and world size, and the time it got them."""
    async for directive in member.directives():
        if isinstance(directive, Run):
            assignment = directive.roster.assignment(directive.member)
            assert assignment is not None, "a Run directive has its member's rank assignment"
            return assignment.group_rank, len(directive.roster.seats), time.monotonic()
    raise CaseFailed("a member's rendezvous ended without a round")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.crowd", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="N")
    parser.add_argument("--processes", type=int, default=16, help="processes for all members")
    parser.add_argument("--limit-seconds", type=float, default=120.0, help="timeout per size")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (build/bench)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 if a size reached no round or exceeded the promised requests per member."""
    options = parse(arguments)
    logs = options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    facts = machine_facts()
    preload()
    costs: list[Cost] = []
    failures: dict[str, str] = {}
    for size in options.sizes:
        log = logs / f"crowd-{size}.log"
        log.unlink(missing_ok=True)
        try:
            cost = measure(size, min(size, options.processes), options.limit_seconds, log)
        except (CaseFailed, EtcdFailed, ProgramMissing) as failure:
            failures[str(size)] = str(failure)
            print(f"{size} members: failed: {failure}", flush=True)
            continue
        costs.append(cost)
        line = f"{cost.wall_seconds:.2f} s, {cost.requests_per_member} requests per member"
        spent = 1000 * cost.cpu_seconds / size, 1000 * cost.etcd_cpu_seconds / size
        line += ", CPU per member: {:.1f} ms, etcd's: {:.1f} ms".format(*spent)
        print(f"{size} members: {line}", flush=True)
    content = {
        "benchmark": "crowd",
        "machine": facts,
        "requests_per_member": {str(cost.members): cost.requests_per_member for cost in costs},
        "results": [asdict(cost) for cost in costs],
        "failures": failures,
    }
    keep(options.output / "crowd.json", content)
    print(f"written: {options.output / 'crowd.json'}")
    expensive = [cost for cost in costs if cost.requests_per_member > MOST_REQUESTS]
    return int(bool(failures or expensive))


if __name__ == "__main__":
    sys.exit(main())
