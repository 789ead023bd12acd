"""Recovery of training frameworks up to the first step: `python -m bench.frameworks`.

Runs the examples of six frameworks on two nodes with one worker each, kills a worker at three
moments, and measures the time from the kill until every rank has completed its first step in a new
process: warm and cold under ElasticJob, and under torchrun (`--max-restarts`, c10d) with the same
script. Each measurement has a fresh job. The numbers go to build/bench/frameworks.json.

    5s, 15s   so many seconds after the workers of a fresh job have started
    steady    20 s after the first step of all ranks

For comparison the set-up work of each framework is measured: from the start of its processes to the
first step, without the time of their imports. A full run takes about an hour:
`--frameworks accelerate --moments steady --repeat 1` takes three minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from bench.machine import machine_facts
from bench.numbers import median_or_none, ratio
from bench.results import keep
from bench.settings import OUTPUT
from bench.training.jobs import NODES, JobFailed, running
from bench.training.set_up import set_up_seconds
from bench.training.steps import all_stepped
from tests.corpus.environments import cache, environment

LAUNCHERS: Mapping[str, list[str]] = {
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node=1"],
    "fsdp2": [],
    "accelerate": [],
    "transformers": [],
    "lightning": [],
    "deepspeed": [],
}
"""Frameworks, folders of `examples/`, with the launcher in the command of their job."""
STEADY_SECONDS = 20.0
STEADY_TARGET_SECONDS = 2.0
SET_UP_TARGET = 1.3
"""Targets of a warm steady recovery: either of them suffices."""


class System(StrEnum):
    """System that restarts the workers."""

    WARM = "warm"
    COLD = "cold"
    TORCHRUN = "torchrun"


class Moment(StrEnum):
    """Moment of the kill."""

    STEADY = "steady"
    EARLY = "5s"
    LATER = "15s"


_AFTER_START = {Moment.EARLY: 5.0, Moment.LATER: 15.0}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Seconds from the kill to the first new step of all ranks, or an error instead.

    Args:
        cold_reason: the reason, if ElasticJob's status calls the start cold.
    """

    seconds: float | None
    error: str | None = None
    cold_reason: str | None = None


@dataclass(slots=True)
class Measured:
    """All repeats of one moment of one framework under one system."""

    framework: str
    moment: Moment
    system: System
    outcomes: list[Outcome] = field(default_factory=list)

    def seconds(self) -> float | None:
        return median_or_none([outcome.seconds for outcome in self.outcomes])

    def to_json(self) -> dict[str, object]:
        errors = [outcome.error for outcome in self.outcomes if outcome.error]
        seconds = self.seconds()
        return {
            "framework": self.framework,
            "moment": self.moment,
            "system": self.system,
            "seconds": None if seconds is None else round(seconds, 2),
            "runs": [None if o.seconds is None else round(o.seconds, 2) for o in self.outcomes],
            "cold_reasons": [o.cold_reason for o in self.outcomes if o.cold_reason],
            "error": errors[0] if errors else None,
        }


Table = dict[tuple[str, Moment, System], Measured]


def _seconds(table: Table, framework: str, moment: Moment, system: System) -> float | None:
    cell = table.get((framework, moment, system))
    return cell.seconds() if cell else None


def ratios(table: Table) -> dict[str, float | None]:
    """Return our speed-up over torchrun by `<framework>/<moment>/<warm or cold>`."""
    return {
        f"{framework}/{moment}/{system}": ratio(
            _seconds(table, framework, moment, System.TORCHRUN), cell.seconds()
        )
        for (framework, moment, system), cell in table.items()
        if system is not System.TORCHRUN
    }


def missed(table: Table, set_up: Mapping[str, float | None]) -> list[str]:
    """Return the targets that were not reached, of those measured.

    A warm steady recovery takes at most 2 s or 1.3 times the framework's set-up work, and a warm
    recovery never takes longer than a cold one.
    """
    found = []
    for (framework, moment, system), cell in table.items():
        if system is not System.WARM:
            continue
        name, seconds = f"{framework}/{moment}/{system}", cell.seconds()
        if seconds is None:
            found.append(f"{name}: no recovery")
            continue
        cold = _seconds(table, framework, moment, System.COLD)
        if cold is not None and seconds > cold:
            found.append(f"{name}: {seconds:.2f} s, slower than cold with {cold:.2f} s")
        limit = max(STEADY_TARGET_SECONDS, SET_UP_TARGET * (set_up.get(framework) or 0.0))
        if moment is Moment.STEADY and seconds > limit:
            found.append(f"{name}: {seconds:.2f} s, more than {limit:.2f} s")
    return found


def interpreter(framework: str) -> Path:
    """Return the Python that has the framework's packages; install it if it is not in the cache."""
    name = "deepspeed" if framework == "deepspeed" else "frameworks"
    return environment(cache(), name) / "bin" / "python"


def recovery(framework: str, moment: Moment, system: System, limit_seconds: float) -> Outcome:
    """Kill a worker of a fresh job at this moment; measure until all ranks have stepped."""
    try:
        with running(framework, system, interpreter(framework), LAUNCHERS[framework]) as job:
            began = time.time()
            job.wait(job.workers_run, "start of the workers", limit_seconds)
            pause = _AFTER_START.get(moment)
            if pause is None:
                job.wait(
                    lambda: all_stepped(job.first_steps(), began), "the first step", limit_seconds
                )
                pause = STEADY_SECONDS
            time.sleep(pause)
            killed = time.time()
            job.kill_worker()
            stepped = job.wait(
                lambda: all_stepped(job.first_steps(), killed), "the next step", limit_seconds
            )
            return Outcome(stepped - killed, None, job.cold_reason())
    except JobFailed as error:
        return Outcome(None, str(error))


def measure(options: argparse.Namespace) -> Table:
    """Run all repeats, sequentially, the systems in turn, so that a busy time concerns all."""
    table: Table = {}
    for framework in options.frameworks:
        for moment in map(Moment, options.moments):
            cells = {each: Measured(framework, moment, each) for each in System}
            cells = {each: cells[each] for each in map(System, options.systems)}
            table.update({(framework, moment, each): cell for each, cell in cells.items()})
            for turn in range(options.repeat):
                for system, cell in cells.items():
                    outcome = recovery(framework, moment, system, options.limit_seconds)
                    cell.outcomes.append(outcome)
                    name = f"[{turn + 1}/{options.repeat}] {framework} {moment} {system}"
                    print(f"{name}: {_shown(outcome)}", flush=True)
    return table


def _shown(outcome: Outcome) -> str:
    if outcome.seconds is None:
        return f"never: {outcome.error}"
    reason = f" (cold: {outcome.cold_reason})" if outcome.cold_reason else ""
    return f"{outcome.seconds:.2f} s{reason}"


def set_up_work(options: argparse.Namespace) -> dict[str, float | None]:
    """Return the median seconds of each framework's set-up work; None if it made no step."""
    found: dict[str, float | None] = {}
    for framework in options.frameworks:
        seconds: list[float | None] = []
        for _ in range(options.repeat):
            try:
                python = interpreter(framework)
                seconds.append(set_up_seconds(framework, python, options.limit_seconds))
            except JobFailed as error:
                print(f"{framework} without a launcher: {error}", file=sys.stderr)
                seconds.append(None)
        middle = median_or_none(seconds)
        found[framework] = None if middle is None else round(middle, 2)
        print(f"{framework}: set-up work of {found[framework]} s", flush=True)
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.frameworks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    frameworks, moments, systems = list(LAUNCHERS), list(map(str, Moment)), list(map(str, System))
    parser.add_argument("--frameworks", nargs="+", choices=frameworks, default=frameworks)
    parser.add_argument("--moments", nargs="+", choices=moments, default=moments)
    parser.add_argument("--systems", nargs="+", choices=systems, default=systems)
    parser.add_argument("--repeat", type=_positive, default=3, metavar="N", help="runs of each (3)")
    parser.add_argument("--limit-seconds", type=float, default=120.0, help="timeout: `never` (120)")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (build/bench)")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 if ours did not recover from a fault; missed targets are only reported."""
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    facts = machine_facts()
    set_up = set_up_work(options)
    table = measure(options)
    content: dict[str, Any] = {
        "benchmark": "frameworks",
        "machine": facts,
        "nodes": NODES,
        "limit_seconds": options.limit_seconds,
        "set_up_seconds": set_up,
        "ratios": ratios(table),
        "missed": missed(table, set_up),
        "results": [cell.to_json() for cell in table.values()],
    }
    keep(options.output / "frameworks.json", content)
    for target in content["missed"]:
        print(f"missed: {target}")
    print(f"written: {options.output / 'frameworks.json'}")
    ours = [cell for cell in table.values() if cell.system is not System.TORCHRUN]
    return int(any(cell.seconds() is None for cell in ours))


if __name__ == "__main__":
    sys.exit(main())
