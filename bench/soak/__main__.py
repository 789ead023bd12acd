"""Soak test of one training run with hundreds of random faults: `python -m bench.soak`.

examples/digits trains under `elasticjob run`, or with `--cluster` in pods, while its workers,
agents, launchers and nodes are killed, its nodes drained and scaled down and up, and etcd (on a
cluster also the operator) is killed. After each fault training must resume at the desired size, and
the round's cause, the job's restarts and counts, its first failure and its explanation must match
the fault. In the end the model must be as accurate as after undisturbed training, and no process,
object, key, socket or file may be left. The results go to build/bench/soak.json; a seed determines
the faults. 200 faults take about a quarter of an hour on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.machine import machine_facts
from bench.results import keep
from bench.settings import OUTPUT, REPOSITORY, child_environment
from bench.soak.disturbances import Disturbance, JobState, disturbance, judged
from bench.soak.local import SoakedHere
from bench.soak.run import NAME, Soaked
from elasticjob_cli.errors import CommandError

LEAST_ACCURACY = 0.95
WORSE = 0.02
"""Maximum loss of accuracy compared with undisturbed training."""


def soak(job: Soaked, faults: int, seed: int, evidence: Path) -> dict[str, Any]:
    """Run the soak test and return its results; `broken` has the error that ended it early."""
    chance = random.Random(seed)
    found: dict[str, Any] = {"faults": [], "steps": 0, "accuracy": 0.0, "left": [], "broken": ""}
    with job:
        try:
            job.trains()
            print(f"{job.wanted} nodes train", flush=True)
            for number in range(1, faults + 1):
                row = _disturbed(job, number, chance)
                found["faults"].append(row)
                wrong = f", WRONG: {row['wrong']}" if row["wrong"] else ""
                print(f"[{number}/{faults}] {row['what']}: {row['seconds']} s{wrong}", flush=True)
                if wrong:
                    job.keep(evidence / str(number))
            found["steps"] = job.finish()
            print(f"no more faults: the training ends at step {found['steps']}", flush=True)
            found["accuracy"] = job.ends()
            print("it succeeded: checking for leftovers", flush=True)
            found["left"] = job.left()
        except (AssertionError, CommandError, subprocess.SubprocessError) as error:
            found["broken"] = str(error)
            job.keep(evidence / "broken")
    return found


def _disturbed(job: Soaked, number: int, chance: random.Random) -> dict[str, Any]:
    before = job.standing()
    while not job.may(chosen := disturbance(chance, job.weights, job.wanted, before)):
        pass
    since = time.monotonic()
    job.do(chosen, before)
    after = job.trains(chosen)
    return _row(number, chosen, before, after, job.evicts) | {
        "seconds": round(time.monotonic() - since, 2)
    }


def _row(
    number: int, chosen: Disturbance, before: JobState, after: JobState, evicts: bool
) -> dict[str, Any]:
    return {
        "number": number,
        "what": str(chosen),
        "kind": chosen.kind.value,
        "rounds": [cause.kind for cause in after.since(before)],
        "wrong": judged(chosen, before, after, evicts=evicts),
    }


def undisturbed(folder: Path, steps: int) -> float:
    """Return the accuracy after the same number of undisturbed steps."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    words = ["--steps", str(steps), "--checkpoint-dir", str(folder / "alone")]
    subprocess.run(
        [sys.executable, "train.py", *words],
        env=child_environment(**alone),
        cwd=REPOSITORY / "examples" / "digits",
        stdout=subprocess.DEVNULL,
        check=True,
    )
    accuracy: float = json.loads((folder / "alone" / "result.json").read_text())["accuracy"]
    return accuracy


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 if any check failed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cluster", action="store_true", help="use pods on the tests' cluster")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (build/bench)")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    # A short name: sockets are below it.
    with tempfile.TemporaryDirectory(prefix="ej-soak-") as name:
        folder = Path(name)
        job = _in_pods(options.faults) if options.cluster else SoakedHere(folder, options.faults)
        evidence = options.output / "soak-evidence"
        found = soak(job, options.faults, options.seed, evidence)
        alone = undisturbed(folder, found["steps"]) if found["steps"] else None
    content = {
        "benchmark": "soak",
        "where": "cluster" if options.cluster else "this machine",
        "machine": machine_facts(),
        "seed": options.seed,
        "undisturbed_accuracy": alone,
        **found,
    }
    keep(options.output / "soak.json", content)
    return _summed_up(content)


def _in_pods(faults: int) -> Soaked:
    """Return the job on a cluster; imported late, as it needs modules of the tests."""
    from bench.soak.pods import SoakedPods

    return SoakedPods(faults)


def _summed_up(content: dict[str, Any]) -> int:
    rows = content["faults"]
    for kind, count in sorted(Counter(row["kind"] for row in rows).items()):
        seconds = sorted(row["seconds"] for row in rows if row["kind"] == kind)
        print(f"{kind}: {count} times, median {median(seconds):.2f} s, maximum {seconds[-1]} s")
    wrong = [row for row in rows if row["wrong"]]
    accuracy, alone = content["accuracy"], content["undisturbed_accuracy"]
    print(f"accuracy {accuracy}, undisturbed {alone}; {len(wrong)} of {len(rows)} reports wrong")
    print(f"leftovers of {NAME}: {', '.join(content['left']) or 'none'}")
    if content["broken"]:
        print(f"the run was not completed: {content['broken']}")
        return 1
    good = accuracy >= max(LEAST_ACCURACY, alone - WORSE)
    return int(not good or bool(wrong) or bool(content["left"]))


if __name__ == "__main__":
    sys.exit(main())
