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
`--length 90 --intervals 30 --models 8MB` takes a quarter of an hour. With the interval 0 there are
no faults: 1 less the goodput is the overhead of a system. With `--add` a call measures a part: its
runs go to those in goodput.json, each with the undisturbed run of its own part. With `--cores N`
the runs go side by side, each on N processor cores of its own: on 16 cores with `--cores 2` all
systems of a model take as long as one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench import processes
from bench.gang import Gang, NotRecovered, gang
from bench.goodput.steps import Step, Work, curve, fault_times, read_steps, work
from bench.goodput.systems import SYSTEMS, UNDISTURBED, System, prepared
from bench.machine import machine_facts
from bench.peers.records import STARTED, WIDTHS
from bench.plot import plot_goodput
from bench.results import keep
from bench.settings import OUTPUT
from tests.corpus.environments import cache, environment

REPLACED_SECONDS = 2.0
START_SECONDS = 120.0
POINTS = 400
BASELINE = "undisturbed"
_KNOWN = {system.name: system for system in SYSTEMS}


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
        interval: seconds between two faults; 0 without faults, None for the run that all are
            compared with.
        part: time at which its model's runs began, the first of which was undisturbed.
    """

    system: str
    model: str
    interval: float | None
    seconds: float
    faults: list[tuple[float, str]] = field(default_factory=list)
    work: Work | None = None
    curve: list[tuple[float, int]] = field(default_factory=list)
    error: str | None = None
    part: str = ""

    @property
    def name(self) -> str:
        return f"{self.system}/{self.model}/{self.interval or 0:g}s"


def run(system: str, run: Run, options: argparse.Namespace, logs: Path) -> Run:
    """Train with faults; return the run with its work, or with the error."""
    _train(_KNOWN[system], run, options, logs)
    print(f"{run.name}: {run.work} {run.error or ''}", flush=True)
    return run


def _train(system: System, run: Run, options: argparse.Namespace, logs: Path) -> None:
    interpreter = None
    if system.needs is not None:
        interpreter = options.peers_python or (
            environment(cache(), system.needs) / "bin" / "python"
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
    times = fault_times(run.seconds, run.interval or 0.0)
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
    undisturbed = {(run.model, run.part): run.work for run in runs if run.system == BASELINE}
    goodput: dict[str, float | None] = {}
    steps_lost: dict[str, int | None] = {}
    seconds_lost: dict[str, float | None] = {}
    for run in runs:
        base = undisturbed.get((run.model, run.part))
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


def added(known: Sequence[Run], runs: Sequence[Run]) -> list[Run]:
    """Return the runs of earlier parts and these, which replace those of the same name.

    An undisturbed run stays as long as its part has another run.
    """
    names = {run.name for run in runs}
    kept = [run for run in known if run.interval is None or run.name not in names]
    used = {(run.model, run.part) for run in kept if run.interval is not None}
    kept = [run for run in kept if (run.model, run.part) in used]
    return [*kept, *runs]


def read_parts(path: Path, settings: dict[str, Any]) -> list[Run]:
    """Return the runs in a file of results; none if there is no file.

    Exits if it cannot be read, or was measured with other settings.
    """
    try:
        content = json.loads(path.read_bytes())
        measured = {name: content.get(name) for name in settings}
        runs = [_run(row) for row in content["runs"]]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        sys.exit(f"{path} cannot be read, so nothing can be added to it: {error!r}; remove it")
    if measured != settings:
        sys.exit(f"{path} was measured with {measured}, not {settings}: give another --output")
    return runs


def _run(row: dict[str, Any]) -> Run:
    fields = {name: row[name] for name in Run.__dataclass_fields__}
    fields["work"] = None if row["work"] is None else Work(**row["work"])
    return Run(
        **fields | {name: [(at, it) for at, it in row[name]] for name in ("faults", "curve")}
    )


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
    parser.add_argument(
        "--intervals",
        nargs="+",
        type=float,
        default=[30.0, 120.0],
        metavar="S",
        help="seconds between two faults; 0 for none (30 120)",
    )
    parser.add_argument("--length", type=float, default=600.0, help="seconds of each run (600)")
    parser.add_argument("--nodes", type=int, default=2, help="one worker each (2)")
    parser.add_argument("--step-seconds", type=float, default=0.05, help="minimum (0.05)")
    parser.add_argument("--store-seconds", type=float, default=30.0, help="between checkpoints")
    parser.add_argument(
        "--cores", type=int, metavar="N", help="runs side by side, N cores for each"
    )
    parser.add_argument(
        "--peers-python", type=Path, metavar="PATH", help="interpreter with torchft and NVRx"
    )
    parser.add_argument("--add", action="store_true", help="keep the other runs of earlier calls")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (build/bench)")
    options = parser.parse_args(arguments)
    if max(options.intervals) > options.length:
        parser.error(f"--length must be at least the longest interval, {max(options.intervals):g}")
    if min(options.intervals) < 0:
        parser.error("--intervals must not be negative")
    available = len(os.sched_getaffinity(0))
    if options.cores is not None and not 1 <= options.cores <= available:
        parser.error(f"--cores must be from 1 to {available}, the cores of this process")
    return options


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that all parts of a result share."""
    return {
        "length_seconds": options.length,
        "nodes": options.nodes,
        "step_seconds": options.step_seconds,
        "store_seconds": options.store_seconds,
        "kinds": list(options.kinds),
        "cores": options.cores,
    }


def slots(cores: int | None) -> list[set[int]]:
    """Return the processor cores of each run of those side by side; one set of all with None."""
    available = sorted(os.sched_getaffinity(0))
    size = cores or len(available)
    return [set(available[at : at + size]) for at in range(0, len(available) - size + 1, size)]


def run_all(
    planned: Sequence[tuple[Run, str]], options: argparse.Namespace, logs: Path
) -> list[Run]:
    """Run each with its system, as many at a time as there are slots; return them in this order."""
    context = multiprocessing.get_context("fork")
    free = context.SimpleQueue()
    found = slots(options.cores)
    for slot in found:
        free.put(slot)
    with ProcessPoolExecutor(len(found), context, _pin, (free,)) as pool:
        waiting = [pool.submit(run, system, one, options, logs) for one, system in planned]
        return [done.result() for done in waiting]


def _pin(free: multiprocessing.SimpleQueue[set[int]]) -> None:
    os.sched_setaffinity(0, free.get())  # also of the processes that this one starts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 if ours stopped; a compared system's failure is only reported."""
    options = parse(arguments)
    logs = options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    path, settings = options.output / "goodput.json", settings_of(options)
    earlier = read_parts(path, settings) if options.add else []
    planned: list[tuple[Run, str]] = []
    for model in options.models:
        part = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        calm = Run(BASELINE, model, None, options.length, part=part)
        planned.append((calm, UNDISTURBED))
        for interval in options.intervals:
            for name in options.systems:
                planned.append((Run(name, model, interval, options.length, part=part), name))
    runs = run_all(planned, options, logs)
    found = results(added(earlier, runs))
    content = {"benchmark": "goodput", "machine": machine_facts(), **settings, **found}
    keep(path, content)
    plot_goodput(content["runs"], options.output / "goodput.png")
    for name, share in content["goodput"].items():
        print(f"{name}: goodput {share}")
    print(f"written: {path} and goodput.png")
    return int(any(run.error for run in runs if run.system.startswith("elasticjob")))


if __name__ == "__main__":
    sys.exit(main())
