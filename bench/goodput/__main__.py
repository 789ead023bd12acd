"""Goodput of systems under faults: `python -m bench.goodput`.

Goodput is the number of distinct steps that a job completes in a time with faults, divided by those
of plain torchrun without faults and checkpoints, in a run of the same length with the same script
and model. The time starts when all workers have completed a step. The kinds of faults take turns,
and so do the victims; a killed or drained node is replaced after two seconds:

    worker-killed    SIGKILL for the worker
    node-killed      SIGKILL for the agent and the worker
    drain            SIGTERM for the agent

The numbers and a plot of the steps over time go to build/bench/goodput.json and goodput.png. The
packages of the compared systems are in an environment of their own. A full run takes five hours:
`--length 90 --intervals 30 --models 8MB` takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench import processes
from bench.gang import Gang, NotRecovered, gang
from bench.goodput.steps import Step, Work, curve, fault_times, read_steps, work
from bench.goodput.systems import SYSTEMS, UNDISTURBED, System, prepared
from bench.machine import machine_facts
from bench.peers.trainee import STARTED, WIDTHS
from bench.plot import plot_goodput
from bench.results import keep
from bench.settings import OUTPUT
from tests.corpus.environments import cache, environment

REPLACED_SECONDS = 2.0
START_SECONDS = 120.0
POINTS = 400
BASELINE = "undisturbed"


class Kind(StrEnum):
    """Kinds of faults."""

    WORKER_KILLED = "worker-killed"
    NODE_KILLED = "node-killed"
    DRAIN = "drain"


@dataclass(slots=True)
class Run:
    """One run of a system.

    Args:
        faults: time and kind of each fault.
        interval: seconds between two faults; None without faults.
    """

    system: str
    model: str
    interval: float | None
    seconds: float
    faults: list[tuple[float, str]] = field(default_factory=list)
    work: Work | None = None
    curve: list[tuple[float, int]] = field(default_factory=list)
    error: str | None = None

    @property
    def name(self) -> str:
        return f"{self.system}/{self.model}/{self.interval or 0:g}s"


def run(system: System, run: Run, options: argparse.Namespace, logs: Path) -> None:
    """Train with faults; fill in the work or the error."""
    interpreter = (
        environment(cache(), system.needs) / "bin" / "python" if system.needs is not None else None
    )
    with contextlib.ExitStack() as stack:
        log = logs / f"goodput-{system.name}-lighthouse.log"
        made = stack.enter_context(prepared(system, interpreter, log))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="elasticjob-bench-")))
        (folder / STARTED).touch()
        script = [f"--model={run.model}", f"--folder={folder}"]
        script += [f"--step-seconds={options.step_seconds}"]
        script += [f"--store-seconds={options.store_seconds if run.interval else 1e9}"]
        made = made.with_script(script, options.nodes)
        nodes = stack.enter_context(gang(made, logs, run.name.replace("/", "-")))
        try:
            start = _started(nodes, options.nodes)
            for at, kind in _disturbed(nodes, start, run, options.kinds):
                run.faults.append((round(at - start, 2), kind))
        except NotRecovered as failure:
            run.error = str(failure)
            return
        steps = read_steps(nodes.events_folder)
    end = start + run.seconds
    run.work = work(steps, start, end, options.nodes)
    run.curve = curve(steps, start, end, POINTS)
    if not any(step.at > end - run.seconds / 4 for step in steps):
        run.error = "no step in the last quarter of the time"


def _started(nodes: Gang, size: int) -> float:
    """Start the agents; return the time at which a step of all workers is complete."""
    since = time.monotonic()
    for _ in range(size):
        nodes.start_agent()
    while not (full := _full_steps(nodes, size)):
        if time.monotonic() > since + START_SECONDS:
            raise NotRecovered(f"no step of all {size} workers within {START_SECONDS:g} s")
        time.sleep(0.1)
    return full[0].at


def _full_steps(nodes: Gang, size: int) -> list[Step]:
    return [step for step in read_steps(nodes.events_folder) if step.world == size]


def _disturbed(
    nodes: Gang, start: float, run: Run, kinds: Sequence[str]
) -> Iterator[tuple[float, str]]:
    """Inject the faults until the end of the run; yield each with its time."""
    times = fault_times(run.seconds, run.interval) if run.interval is not None else []
    for number, seconds in enumerate(times):
        _sleep_until(start + seconds)
        kind = kinds[number % len(kinds)]
        victim = sorted(nodes.agents)[number % len(nodes.agents)]
        yield time.monotonic(), _inject(nodes, Kind(kind), victim)
        if kind != Kind.WORKER_KILLED:
            time.sleep(REPLACED_SECONDS)
            nodes.start_agent()
        for member, agent in list(nodes.agents.items()):
            if agent.poll() is not None:  # a platform replaces a node whose agent gave up
                del nodes.agents[member]
                nodes.start_agent()
    _sleep_until(start + run.seconds)


def _inject(nodes: Gang, kind: Kind, victim: int) -> str:
    """Inject a fault; return its kind, or the reason for which there was nothing to kill."""
    try:
        worker = nodes.worker(victim).pid
    except KeyError:
        worker = 0
    if kind is Kind.DRAIN:
        nodes.drain(victim)
    elif kind is Kind.NODE_KILLED:
        processes.kill(nodes.agents.pop(victim).pid)
        if worker:
            processes.kill(worker)
    elif worker and processes.alive(worker):
        processes.kill(worker)
    else:
        return f"{kind}: no worker"
    return str(kind)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def results(runs: Sequence[Run]) -> dict[str, Any]:
    """Return goodput, lost steps and lost seconds by `<system>/<model>/<interval>`."""
    calm = {run.model: run.work for run in runs if run.system == BASELINE}
    goodput: dict[str, float | None] = {}
    steps_lost: dict[str, int | None] = {}
    seconds_lost: dict[str, float | None] = {}
    for run in runs:
        base = calm.get(run.model)
        if run.interval is None:
            continue
        if run.work is None or base is None or not base.distinct:
            goodput[run.name] = steps_lost[run.name] = seconds_lost[run.name] = None
            continue
        share = run.work.distinct / base.distinct
        goodput[run.name] = round(share, 3)
        steps_lost[run.name] = run.work.executed - run.work.distinct
        lost = (1 - share) * run.seconds / max(1, len(run.faults))
        seconds_lost[run.name] = round(lost, 2)
    return {
        "goodput": goodput,
        "steps_lost": steps_lost,
        "seconds_lost_per_fault": seconds_lost,
        "runs": [{**asdict(run), "name": run.name} for run in runs],
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.goodput",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names, kinds = [system.name for system in SYSTEMS], list(map(str, Kind))
    parser.add_argument("--systems", nargs="+", choices=names, default=names)
    parser.add_argument("--models", nargs="+", choices=list(WIDTHS), default=list(WIDTHS))
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--intervals", nargs="+", type=float, default=[30.0, 120.0], metavar="S")
    parser.add_argument("--length", type=float, default=600.0, help="seconds of each run (600)")
    parser.add_argument("--nodes", type=int, default=2, help="one worker each (2)")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="minimum (0.05)")
    parser.add_argument("--store-seconds", type=float, default=30.0, help="between checkpoints")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (build/bench)")
    options = parser.parse_args(arguments)
    if max(options.intervals) > options.length:
        parser.error(f"--length must be at least the longest interval, {max(options.intervals):g}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 if ours stopped; a compared system's failure is only reported."""
    options = parse(arguments)
    logs = options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    known = {system.name: system for system in SYSTEMS}
    runs = []
    for model in options.models:
        cases: list[tuple[str, System, float | None]] = [(BASELINE, known[UNDISTURBED], None)]
        for interval in options.intervals:
            cases += [(name, known[name], interval) for name in options.systems]
        for name, system, interval in cases:
            one = Run(name, model, interval, options.length)
            run(system, one, options, logs)
            runs.append(one)
            print(f"{one.name}: {one.work} {one.error or ''}", flush=True)
    content = {
        "benchmark": "goodput",
        "machine": machine_facts(),
        "length_seconds": options.length,
        "nodes": options.nodes,
        **results(runs),
    }
    keep(options.output / "goodput.json", content)
    plot_goodput(content["runs"], options.output / "goodput.png")
    for name, share in content["goodput"].items():
        print(f"{name}: goodput {share}")
    print(f"written: {options.output / 'goodput.json'} and goodput.png")
    return int(any(run.error for run in runs if run.system.startswith("elasticjob")))


if __name__ == "__main__":
    sys.exit(main())
