"""Partition runner: `python -m tests.partitions --runs 200 --seed 1`; `--only` for single seeds."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path

from elasticjob_agent.zipapp_build import build_zipapp
from tests.partitions.network import sweep
from tests.partitions.plan import draw
from tests.partitions.run import Outcome, Stopped, execute

_FOLDER = Path("build/partitions")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.partitions", description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1, help="the first run's; each has the next")
    parser.add_argument("--at-once", type=int, default=4, help="gangs that run side by side")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="these seeds alone")
    parser.add_argument("--keep", action="store_true", help="keep the logs of good runs as well")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no run after that long")
    parser.add_argument("--folder", type=Path, default=_FOLDER)
    return parser.parse_args()


def _write(folder: Path, outcomes: list[Outcome]) -> None:
    """Merge the outcomes into results.json; a repeated seed replaces its former outcome."""
    path = folder / "results.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for outcome in outcomes:
        known[str(outcome.plan.seed)] = {
            "plan": asdict(outcome.plan),
            "findings": outcome.findings,
            "overlapSeconds": max((one.seconds for one in outcome.overlaps), default=0.0),
            "rank0OverlapSeconds": max(
                (one.seconds for one in outcome.overlaps if one.both_rank_0), default=0.0
            ),
            "stoppedAfter": outcome.stopped_after,
            "resumedAfter": outcome.resumed_after,
            "settledAfter": outcome.settled_after,
        }
    path.write_text(json.dumps(known, indent=1))


def _summary(outcomes: list[Outcome]) -> None:
    bad = sorted(outcome.plan.seed for outcome in outcomes if outcome.findings)
    overlapping = [outcome for outcome in outcomes if outcome.overlaps]
    rank_0 = [one for one in overlapping if any(pair.both_rank_0 for pair in one.overlaps)]
    spare = [one.spare_seconds for one in outcomes if one.spare_seconds is not None]
    print(
        f"{len(outcomes)} runs: {len(overlapping)} with overlapping rounds, {len(rank_0)} of them "
        f"with two rank 0 that write; {len(bad)} with a finding of any kind"
    )
    if spare:
        print(
            "from the last write of a cut worker to the next round's first: "
            f"least {min(spare):.2f} s, median {statistics.median(spare):.2f} s"
        )
    if bad:
        print(f"seeds: {' '.join(map(str, bad))}")


def main() -> int:
    arguments = _arguments()
    seeds = arguments.only or range(arguments.seed, arguments.seed + arguments.runs)
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stop.set())
    sweep()
    outcomes: list[Outcome] = []
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(max_workers=arguments.at_once) as pool,
    ):
        launcher = build_zipapp(Path(scratch) / "launcher.pyz")

        def one(seed: int) -> Outcome:
            late = arguments.seconds and time.monotonic() - began > arguments.seconds
            if stop.is_set() or late:
                raise Stopped
            return execute(draw(seed), folder, launcher, stop, arguments.keep)

        pending = {pool.submit(one, seed) for seed in seeds}
        left = 0
        while pending:
            # Short waits: a signal delivered to another thread does not end this thread's wait.
            finished, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            for done in finished:
                try:
                    outcome = done.result()
                except Stopped:
                    left += 1
                    continue
                outcomes.append(outcome)
                verdict = "; ".join(outcome.findings) or "ok"
                print(f"seed {outcome.plan.seed}: {outcome.plan}: {verdict}", flush=True)
    _write(folder, outcomes)
    _summary(outcomes)
    if left:
        print(f"{left} runs were not made", file=sys.stderr)
    return 1 if any(outcome.findings for outcome in outcomes) else 130 if stop.is_set() else 0


if __name__ == "__main__":
    sys.exit(main())
