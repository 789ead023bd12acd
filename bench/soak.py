"""`python -m bench.soak`: one training run through hundreds of random faults.

examples/digits trains under `elasticjob run` while its workers, agents, launchers and nodes are
killed, its nodes drained and scaled away and back, and etcd is killed. After each fault training
must come back, at the size that is wanted, with the round's cause and the job's restarts telling
what really happened. In the end the model must be as good as one that was left alone, and no
process, socket or file may be left. What happened goes to build/bench/soak.json; a seed names the
faults. 200 faults take about 15 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
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

from bench.disturbances import Disturbance, Told, disturbance, judged
from bench.settings import OUTPUT, REPOSITORY, child_environment
from bench.soaked import NAME, STEPS_OF_FAULT, Soaked, manifest

LEAST_ACCURACY = 0.95
WORSE = 0.02
"""How much less accurate than undisturbed training the result may be."""
END_SECONDS = 180.0


def soak(folder: Path, faults: int, seed: int) -> dict[str, Any]:
    """The whole run; raises AssertionError saying what was not as it must be."""
    chance = random.Random(seed)
    rows: list[dict[str, Any]] = []
    with Soaked(folder, manifest(folder, faults)) as job:
        job.trains(job.wanted)
        for number in range(1, faults + 1):
            before = job.told()
            chosen = disturbance(chance, job.wanted, before)
            since = time.monotonic()
            job.do(chosen)
            after = job.trains(job.wanted, chosen)
            row = _row(number, chosen, before, after, time.monotonic() - since)
            rows.append(row)
            wrong = f", WRONG: {row['wrong']}" if row["wrong"] else ""
            print(f"[{number}/{faults}] {row['what']}: {row['seconds']} s{wrong}", flush=True)
        job.ends(END_SECONDS)
        result = json.loads((folder / "checkpoints" / "result.json").read_text())
    return {"faults": rows, "accuracy": result["accuracy"], "left": job.left()}


def _row(
    number: int, chosen: Disturbance, before: Told, after: Told, seconds: float
) -> dict[str, Any]:
    return {
        "number": number,
        "what": str(chosen),
        "kind": chosen.kind.value,
        "seconds": round(seconds, 2),
        "rounds": [cause.kind for cause in after.since(before)],
        "wrong": judged(chosen, before, after),
    }


def undisturbed(folder: Path, faults: int) -> float:
    """The accuracy after as many steps that nothing disturbed."""
    command = manifest(folder, faults)["spec"]["template"]["spec"]["containers"][0]
    words = [*command["command"][1:], *command["args"]]
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    subprocess.run(
        [sys.executable, *words, "--step-seconds=0", f"--checkpoint-dir={folder / 'alone'}"],
        env=child_environment(**alone),
        cwd=REPOSITORY / "examples" / "digits",
        stdout=subprocess.DEVNULL,
        check=True,
    )
    accuracy: float = json.loads((folder / "alone" / "result.json").read_text())["accuracy"]
    return accuracy


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where anything was not as it must be."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (build/bench)")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    # Short: sockets lie below it.
    with tempfile.TemporaryDirectory(prefix="ej-soak-") as name:
        folder = Path(name)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        found = soak(folder, options.faults, options.seed)
        alone = undisturbed(folder, options.faults)
    content = {
        "benchmark": "soak",
        "seed": options.seed,
        "steps": STEPS_OF_FAULT * (options.faults + 1),
        "undisturbed_accuracy": alone,
        **found,
    }
    (options.output / "soak.json").write_text(json.dumps(content, indent=2) + "\n")
    return _summed_up(content)


def _summed_up(content: dict[str, Any]) -> int:
    rows = content["faults"]
    for kind, count in sorted(Counter(row["kind"] for row in rows).items()):
        seconds = sorted(row["seconds"] for row in rows if row["kind"] == kind)
        print(f"{kind}: {count} times, {median(seconds):.2f} s at the median, {seconds[-1]} most")
    wrong = [row for row in rows if row["wrong"]]
    accuracy, alone = content["accuracy"], content["undisturbed_accuracy"]
    print(f"accuracy {accuracy}, undisturbed {alone}; {len(wrong)} of {len(rows)} told wrongly")
    print(f"left over of {NAME}: {', '.join(content['left']) or 'nothing'}")
    good = accuracy >= max(LEAST_ACCURACY, alone - WORSE)
    return int(not good or bool(wrong) or bool(content["left"]))


if __name__ == "__main__":
    sys.exit(main())
