"""Overhead of the sidecar on training: `python -m bench.overhead`.

A launcher and an agent, as in a pod, run a training loop. The agent is alternately stopped and
continued (SIGSTOP, SIGCONT), each time for less than its lease. So the same process trains with and
without a sidecar, which rules out differences of machine and memory layout. Then the agent's own
CPU time and memory are measured. The numbers go to build/bench/overhead.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.machine import machine_facts
from bench.numbers import median_or_none
from bench.pod import Pod, pod
from bench.processes import processor_seconds, resident_mib
from bench.results import keep
from bench.settings import OUTPUT

STEPPER = Path(__file__).parent / "peers" / "stepper.py"
START_SECONDS = 60.0
PHASE_SECONDS = 2.0
"""Duration of a phase; shorter than the rest of a 5 s lease when its renewal is due."""
MOST_RESIDENT_MIB = 60.0
MOST_TRIES = 5
"""Maximum number of tries for each turn: on a busy machine no step may end within a phase."""


class NoSteps(Exception):
    """Training loop that did not start in time; the text has the end of the pod's log."""


@dataclass(frozen=True, slots=True)
class Block:
    """Several training steps: their end time, and their median in seconds."""

    at: float
    step: float


@dataclass(frozen=True, slots=True)
class Turn:
    """Step times in seconds of adjacent phases without and with the agent."""

    alone: float
    beside: float


@dataclass(frozen=True, slots=True)
class Agent:
    """Resources of the agent during undisturbed training."""

    seconds: float
    cpu_seconds: float
    resident_mib: float

    @property
    def cpu_percent(self) -> float:
        """CPU usage in percent of one CPU."""
        return round(100 * self.cpu_seconds / self.seconds, 3)


def blocks(text: str) -> list[Block]:
    """Parse the training loop's output so far, without an incomplete last line."""
    whole = text[: text.rfind("\n") + 1]
    return [Block(line["at"], line["step"]) for line in map(json.loads, whole.splitlines())]


def within(found: Sequence[Block], begin: float, end: float) -> float | None:
    """Return the step time of the fastest block that lies entirely in the interval.

    Other load on the machine comes in bursts, while an agent is active every second.
    """
    pairs = pairwise(found)  # a block begins at the end of the previous one
    steps = [this.step for before, this in pairs if before.at >= begin and this.at <= end]
    return min(steps, default=None)


def overhead(turns: Sequence[Turn]) -> float | None:
    """Return the relative slow-down of a step beside an agent, as the median over the turns."""
    return median_or_none([turn.beside / turn.alone - 1 for turn in turns])


def take_turns(steps: Path, agent: int, count: int) -> list[Turn]:
    """Train alternately without and with the agent; pair each phase with both neighbours.

    A turn without such a pair is repeated.
    """
    turns = []
    beside = _phase(steps)
    complete = 0
    for _ in range(MOST_TRIES * count):
        if complete == count:
            break
        os.kill(agent, signal.SIGSTOP)
        alone = _phase(steps)
        os.kill(agent, signal.SIGCONT)
        before, beside = beside, _phase(steps)
        found = [Turn(alone, with_it) for with_it in (before, beside) if alone and with_it]
        complete += bool(found)
        turns += found
    return turns


def _phase(steps: Path) -> float | None:
    begin = time.monotonic()
    time.sleep(PHASE_SECONDS)
    return within(blocks(steps.read_text()), begin, time.monotonic())


def watch_agent(agent: int, seconds: float) -> Agent:
    began, before = time.monotonic(), processor_seconds(agent)
    time.sleep(seconds)
    spent, lasted = processor_seconds(agent) - before, time.monotonic() - began
    return Agent(round(lasted, 2), round(spent, 3), round(resident_mib(agent), 1))


def _wait_for_steps(steps: Path, there: Pod) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not (steps.exists() and blocks(steps.read_text())):
        if time.monotonic() > deadline or not there.runs():
            tail = there.log.read_text(errors="replace")[-1000:]
            raise NoSteps(f"no training step within {START_SECONDS:g} s; the pod's log:\n{tail}")
        time.sleep(0.1)


def measure(turns: int, idle_seconds: float) -> tuple[list[Turn], Agent]:
    with pod([sys.executable, str(STEPPER), "steps.jsonl"]) as there:
        steps = there.folder / "steps.jsonl"
        _wait_for_steps(steps, there)
        taken = take_turns(steps, there.agent, turns)
        return taken, watch_agent(there.agent, idle_seconds)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__)
    parser.add_argument("--turns", type=int, default=30, help="turns of 2 s without and 2 s with")
    parser.add_argument("--idle-seconds", type=float, default=30.0)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (build/bench)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 if the agent exceeds the promised memory, or no turn was complete."""
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    facts = machine_facts()
    turns, agent = measure(options.turns, options.idle_seconds)
    share = overhead(turns)
    content = {
        "benchmark": "overhead",
        "machine": facts,
        "step_overhead": share,
        "agent": {**asdict(agent), "cpu_percent": agent.cpu_percent},
        "step_seconds": median([turn.alone for turn in turns]) if turns else None,
        "turns": [asdict(turn) for turn in turns],
    }
    keep(options.output / "overhead.json", content)
    share_text = "no complete turn" if share is None else f"{100 * share:+.2f} % of a step"
    print(f"{share_text}; the agent: {agent.resident_mib} MiB, {agent.cpu_percent} % of a CPU")
    print(f"written: {options.output / 'overhead.json'}")
    return int(share is None or agent.resident_mib > MOST_RESIDENT_MIB)


if __name__ == "__main__":
    sys.exit(main())
