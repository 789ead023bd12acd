"""Demo (`make demo`): trains a real model on this machine while nodes join, leave and fail.

Runs examples/digits through the code of `elasticjob run`, injects faults through the user's own
commands, and writes to build/demo: `status.json` (the final object), `rounds.json` (each round with
its cause and times) and `timeline.png`. Fails unless the job succeeds with at least 95% accuracy.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib as mpl
from rich.console import Console

from elasticjob_cli.commands.run import Choice, execute, prepare
from elasticjob_cli.commands.tables import history_lines
from elasticjob_cli.errors import CommandError
from elasticjob_cli.local.control_client import send_command
from elasticjob_cli.local.display import PlainView, Snapshot
from elasticjob_cli.local.job_store import JobFolder
from elasticjob_cli.local.stored_job import RunOutcome

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = ROOT / "examples" / "digits" / "elasticjob.yaml"
OUTPUT = ROOT / "build" / "demo"
NAME = "demo"
LEAST_ACCURACY = 0.95
STEP_SECONDS = 60.0
"""Timeout for each step of the demo."""
TRAINED_STEPS = 16
"""Number of training steps that prove progress after a fault."""

COLOURS = {"running": "#4c9f70", "starting": "#d8d8d8", "waiting": "#f0c75e"}
OTHER = "#d98a6a"


@dataclass(frozen=True, slots=True)
class Moment:
    """Sample of each pod's state and ranks at one time."""

    seconds: float
    pods: dict[str, tuple[str, str]]


@dataclass(slots=True)
class Recorder:
    """View that prints plain lines and records everything it was shown."""

    plain: PlainView
    latest: Snapshot | None = None
    moments: list[Moment] = field(default_factory=list)
    curve: list[tuple[float, int, float]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def show(self, snapshot: Snapshot) -> None:
        self.latest = snapshot
        pods = {row.pod: (row.state, row.ranks) for row in snapshot.nodes}
        if not self.moments or self.moments[-1].pods != pods:
            self.moments.append(Moment(snapshot.elapsed_seconds, pods))
        step, accuracy = self.step, snapshot.progress.get("accuracy")
        if isinstance(accuracy, float) and (not self.curve or self.curve[-1][1] != step):
            self.curve.append((snapshot.elapsed_seconds, step, accuracy))
        self.plain.show(snapshot)
        self.changed.set()

    def note(self, elapsed_seconds: float, text: str) -> None:
        self.plain.note(elapsed_seconds, text)

    def output(self, pod: str, line: str) -> None:
        self.plain.output(pod, line)

    def close(self) -> None:
        self.plain.close()

    @property
    def congested(self) -> bool:
        return self.plain.congested

    @property
    def gone(self) -> bool:
        return self.plain.gone

    @property
    def step(self) -> int:
        step = self.latest.progress.get("step", 0) if self.latest else 0
        return step if isinstance(step, int) else 0

    @property
    def running(self) -> list[str]:
        """Pods whose workers run in the current final round."""
        status = self.latest.job.status if self.latest else None
        if status is None or status.rendezvous is None or status.rendezvous.state != "final":
            return []
        number = status.rendezvous.round
        return [m.pod for m in status.members if m.state == "running" and m.round == number]


class Director:
    """Script of the demo: scales the job and injects faults, one after the other."""

    def __init__(self, recorder: Recorder) -> None:
        self._seen = recorder
        self._folder = JobFolder("default", NAME)
        self.acts: list[tuple[float, str]] = []

    async def direct(self) -> None:
        """Run the steps; each waits for its precondition and fails at its deadline."""
        await self._trains("two nodes to train", 2)
        await self._do("scale to 4 nodes", "scale", nodes=4)
        await self._trains("four nodes to train", 4)
        victim = self._seen.running[1]
        await self._do(f"kill a worker of {victim}", "fault", kind="kill-worker", pod=victim)
        await self._trains("all four to train again", 4, lambda: self._restarts >= 1)
        lost = self._seen.running[2]
        await self._do(f"kill node {lost}", "fault", kind="kill-node", pod=lost)
        await self._trains(f"a node in the place of {lost}", 4, lambda: self._without(lost))
        drained = self._seen.running[0]
        await self._do(f"drain node {drained}", "fault", kind="drain", pod=drained)
        await self._trains(f"a node in the place of {drained}", 4, lambda: self._without(drained))
        await self._do("scale to 3 nodes", "scale", nodes=3)
        await self._trains("three nodes to train", 3)
        print("      no more faults: the job runs to its end", flush=True)

    @property
    def _restarts(self) -> int:
        return self._seen.latest.job.status.restarts if self._seen.latest else 0

    def _without(self, pod: str) -> bool:
        return pod not in self._seen.running

    async def _do(self, text: str, verb: str, **arguments: object) -> None:
        assert self._seen.latest is not None
        print(f"----- {text}", flush=True)
        self.acts.append((self._seen.latest.elapsed_seconds, text))
        await asyncio.to_thread(send_command, self._folder, verb, **arguments)

    async def _trains(self, what: str, nodes: int, also: Callable[[], bool] = lambda: True) -> None:
        """Wait until that many nodes run one round and training has advanced in it."""
        try:
            async with asyncio.timeout(STEP_SECONDS):
                while not (len(self._seen.running) == nodes and also()):
                    await self._change()
                reached = self._seen.step
                while self._seen.step < reached + TRAINED_STEPS:
                    await self._change()
        except TimeoutError as error:
            raise CommandError(f"timeout after {STEP_SECONDS:g} s waiting for {what}") from error

    async def _change(self) -> None:
        self._seen.changed.clear()
        await self._seen.changed.wait()


async def play(recorder: Recorder, director: Director) -> RunOutcome:
    """Run the job and the script of faults concurrently; the first error ends both."""
    job, container = prepare(str(MANIFEST), Choice(name=NAME))
    running = asyncio.create_task(execute(job, container, recorder, str(MANIFEST), False))
    directing = asyncio.create_task(director.direct())
    try:
        await asyncio.wait({running, directing}, return_when=asyncio.FIRST_COMPLETED)
        if directing.done():
            directing.result()
            return await running
        ended = running.result()
        raise CommandError(f"the job ended ({ended.job.status.phase}) before the demo's last step")
    finally:
        for task in (directing, running):
            task.cancel()
        await asyncio.gather(running, directing, return_exceptions=True)


def draw(path: Path, recorder: Recorder, acts: list[tuple[float, str]], end: float) -> None:
    """Plot ranks per node over time above, training progress below."""
    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(13, 7), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    names = sorted({pod for moment in recorder.moments for pod in moment.pods})
    for pod in names:
        for begin, until, state, ranks in spans(recorder.moments, pod, end):
            colour = COLOURS.get(state, OTHER)
            top.barh(
                pod, until - begin, left=begin, height=0.62, color=colour, edgecolor="white", lw=0.4
            )
            if ranks and until - begin > end / 60:
                text = f"rank {ranks}" if until - begin > end / 16 else ranks
                top.text((begin + until) / 2, pod, text, ha="center", va="center", fontsize=8)
    top.invert_yaxis()
    top.set_title("Nodes and their ranks", loc="left")
    legend = {**COLOURS, "ending": OTHER}
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in legend.values()]
    top.legend(
        handles, list(legend), ncols=4, loc="lower right", bbox_to_anchor=(1, 1), frameon=False
    )
    bottom.plot([c[0] for c in recorder.curve], [c[1] for c in recorder.curve], color="#33658a")
    bottom.set_ylabel("training step", color="#33658a")
    bottom.set_xlabel("seconds since the start")
    right = bottom.twinx()
    right.plot([c[0] for c in recorder.curve], [c[2] for c in recorder.curve], color="#b5533c")
    right.set_ylabel("test accuracy", color="#b5533c")
    right.set_ylim(0, 1.02)
    for number, (seconds, text) in enumerate(acts):
        for axis in (top, bottom):
            axis.axvline(seconds, color="#444444", linewidth=0.8, linestyle=":")
        bottom.text(
            seconds, 0.62 - 0.09 * (number % 3), f" {text}", fontsize=8,
            transform=bottom.get_xaxis_transform(),
        )  # fmt: skip
    top.set_xlim(0, end)
    figure.savefig(path, dpi=110)


def spans(moments: list[Moment], pod: str, end: float) -> list[tuple[float, float, str, str]]:
    """Return the intervals (from, until, state, ranks) of constant state of a pod."""
    found: list[tuple[float, float, str, str]] = []
    bounds = [*(moment.seconds for moment in moments[1:]), end]
    for moment, until in zip(moments, bounds, strict=True):
        if pod not in moment.pods or moment.pods[pod][0] in ("Failed", "Succeeded"):
            continue
        state, ranks = moment.pods[pod]
        ranks = ranks if state == "running" else ""
        if found and found[-1][1:] == (moment.seconds, state, ranks):
            found[-1] = (found[-1][0], until, state, ranks)
        else:
            found.append((moment.seconds, until, state, ranks))
    return found


def write(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")


def report(ended: RunOutcome, recorder: Recorder, acts: list[tuple[float, str]]) -> bool:
    """Print and write the results; return True if the job succeeded with enough accuracy."""
    write(OUTPUT / "status.json", ended.job.manifest())
    write(OUTPUT / "rounds.json", ended.rounds)
    draw(OUTPUT / "timeline.png", recorder, acts, ended.seconds)
    print("\nRounds:")
    print("\n".join(f"  {line}" for line in history_lines(ended.rounds)))
    result_file = OUTPUT / "checkpoints" / "result.json"
    accuracy = json.loads(result_file.read_bytes())["accuracy"] if result_file.exists() else 0.0
    phase = ended.job.status.phase
    print(
        f"\n{phase} after {ended.seconds:.0f} s: test accuracy {accuracy:.1%} despite "
        f"{len(acts)} disturbances, {ended.job.status.restarts} charged as a failure"
    )
    print(f"{OUTPUT.relative_to(ROOT)}: status.json, rounds.json, timeline.png")
    return phase == "Succeeded" and accuracy >= LEAST_ACCURACY


def main() -> int:
    began = time.monotonic()
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    os.environ["CHECKPOINT_DIR"] = str(OUTPUT / "checkpoints")
    recorder = Recorder(PlainView(Console()))
    director = Director(recorder)
    print(f"Training {MANIFEST.relative_to(ROOT)}; watch it with `elasticjob get {NAME} -w`")
    try:
        ended = asyncio.run(play(recorder, director))
    except CommandError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    good = report(ended, recorder, director.acts)
    print(f"{'done' if good else 'FAILED'} in {time.monotonic() - began:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
