"""`python -m tests.sim --seed N [--trace]`: run seeds, or replay one exactly."""

from __future__ import annotations

import argparse
import sys
import time
import traceback

from tests.sim import schedule
from tests.sim.run import lines, simulate

MOST_SHOWN = 50
"""Maximum number of seeds listed per kind of violation; each can be replayed."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one seed")
    parser.add_argument("--kind", choices=sorted(schedule.PROFILES), help="of this kind alone")
    parser.add_argument("--trace", action="store_true", help="print everything that happened")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    options = parser.parse_args()
    if options.seed is not None:
        return _replay(options.seed, options.kind or "", options.trace)
    seeds = range(options.first, options.first + options.seeds)
    return _survey(seeds, options.kind or "")


def _replay(seed: int, kind: str, trace: bool) -> int:
    result = simulate(seed, plan=schedule.plan(seed, kind))
    if trace:
        print(f"seed {seed}: {result.plan}")
        print("\n".join(lines(result.trace)))
    if result.violation is None:
        print(f"seed {seed} ({result.plan.profile}): every invariant held")
        return 0
    print(f"seed {seed} ({result.plan.profile}): {result.violation}")
    if result.violation.__cause__ is not None:
        traceback.print_exception(result.violation.__cause__)
    return 1


def _survey(seeds: range, kind: str) -> int:
    begin = time.perf_counter()
    found: dict[str, list[int]] = {}
    example: dict[str, str] = {}
    for seed in seeds:
        result = simulate(seed, plan=schedule.plan(seed, kind))
        if result.violation is not None:
            what = f"{result.plan.profile}: {result.violation.invariant}"
            found.setdefault(what, []).append(seed)
            example.setdefault(what, f"seed {seed}: {result.violation}")
    seconds = time.perf_counter() - begin
    for what, failed in sorted(found.items(), key=lambda each: -len(each[1])):
        shown = " ".join(map(str, failed[:MOST_SHOWN]))
        print(f"{len(failed):5} x {what}: {shown}\n        {example[what][:600]}")
    violations = sum(map(len, found.values()))
    print(f"{len(seeds)} seeds, {violations} violations, {len(seeds) / seconds:.0f} seeds/s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
