"""Mixed gangs of torchrun and ours through changes of membership: `python -m bench.interop`.

After each change exactly the expected nodes must train in one process group with one world size,
one master and ranks that are a bijection, from the last checkpoint on. The outcome of each change
goes to build/bench/interop.json. The exit status is 1 if a gang did not survive a change.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.machine import machine_facts
from bench.mixed.backends import BACKENDS, MixedBackend
from bench.mixed.gang import MixedGang, NotTraining, mixed_gang
from bench.mixed.plan import Change, Mix, Side, changes
from bench.mixed.worlds import Disagreement, worlds
from bench.results import keep
from bench.settings import OUTPUT

MIXES = ("1:1", "1:3", "3:1")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a change: the seconds until it was complete, or an error; `rounds` it took."""

    change: str
    node: str
    seconds: float | None
    rounds: int
    size: int
    error: str = ""


def parsed_mix(text: str) -> Mix:
    """Parse a mix: `1:3` is one of ours and three of theirs; a gang of two is doubled."""
    ours, theirs = (int(part) for part in text.split(":"))
    return Mix(2, 2) if (ours, theirs) == (1, 1) else Mix(ours, theirs)


def put_through(
    gang: MixedGang, mix: Mix, plan: Sequence[Change], first: Side, limit_seconds: float
) -> list[Outcome]:
    """Start the gang, apply the changes one after the other, let it finish.

    Stops at the first change that the gang does not survive.
    """
    outcomes: list[Outcome] = []
    for change in (None, *plan):
        since = time.monotonic()
        known = len(worlds(gang.folder))
        node, error, seconds = "", "", None
        try:
            if change is None:
                gang.begin(mix, first)
            else:
                node = gang.apply(change).name
            seconds = round(gang.trains(since, limit_seconds).at - since, 1)
        except (NotTraining, Disagreement) as failure:
            error = str(failure)
        name = "start" if change is None else str(change)
        rounds = len(worlds(gang.folder)) - known
        outcomes.append(Outcome(name, node, seconds, rounds, len(gang.nodes), error))
        shown = f"{seconds} s" if not error else f"never: {error}"
        print(f"  {len(outcomes) - 1:2} {name:20} {node:10} {shown}", flush=True)
        if error:
            return outcomes
    began = time.monotonic()
    codes, error = {}, ""
    try:
        codes = gang.finish()
    except NotTraining as failure:
        error = str(failure)
    if any(codes.values()):
        error = f"exit codes {codes}\n{gang.output()}"
    took = None if error else round(time.monotonic() - began, 1)
    outcomes.append(Outcome("finish", "", took, 0, len(gang.nodes), error))
    print(f"     finish: {took} s {error}", flush=True)
    return outcomes


def run(
    backend: MixedBackend,
    mix: Mix,
    first: Side,
    count: int,
    seed: int,
    limit_seconds: float,
    logs: Path,
) -> dict[str, object]:
    """Run one gang through its changes and return the results."""
    print(f"{backend.name} {mix} (ours:theirs), {count} changes, seed {seed}", flush=True)
    plan = changes(mix, count, seed)
    with mixed_gang(backend, logs / f"{backend.name}-{mix.ours}-{mix.theirs}", seed) as gang:
        outcomes = put_through(gang, mix, plan, first, limit_seconds)
    return {
        "backend": backend.name,
        "ours": mix.ours,
        "theirs": mix.theirs,
        "first": first,
        "seed": seed,
        "survived": not any(outcome.error for outcome in outcomes),
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.interop", description=__doc__)
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--mixes", nargs="+", default=list(MIXES), metavar="OURS:THEIRS")
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=Side, choices=list(Side), default=Side.OURS)
    parser.add_argument("--limit-seconds", type=float, default=90.0, help="timeout per change")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (build/bench)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 if a gang did not survive a change."""
    options = parse(arguments)
    logs = options.output / "logs" / "interop"
    logs.mkdir(parents=True, exist_ok=True)
    results = [
        run(
            BACKENDS[name],
            parsed_mix(mix),
            options.first,
            options.changes,
            options.seed,
            options.limit_seconds,
            logs,
        )
        for name in options.backends
        for mix in options.mixes
    ]
    content = {"benchmark": "interop", "machine": machine_facts(), "results": results}
    path = options.output / "interop.json"
    keep(path, content)
    print(f"written: {path}")
    return int(not all(result["survived"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
