"""Mutation testing of the protocol's decisions: `python -m scripts.mutation CACHE [MODULE ...]`.

mutmut, which has its own environment in the cache, changes one operator, constant, argument or
branch of `elasticjob_rendezvous/protocol` at a time. Table tests try each mutant, then the
simulation tries those that no table kills. The checkout is never changed: mutants and results are
below `build/mutation`. A stopped run continues, and a later one tries the survivors again. Without
modules it takes all modules that decide: hours.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from scripts.environment import (
    IDLE_SECONDS,
    LOCKS,
    ROOT,
    STAMP,
    forget_idle,
    install_locked,
    is_complete,
    key,
    locked,
)
from scripts.mutation_trials import Mutant, Report, mutants, try_seeds, try_tables

MUTMUT = "mutmut==3.8.1"
PACKAGE = "elasticjob_rendezvous.protocol"
WORK = ROOT / "build" / "mutation"
SEEDS = 200
DECIDE = (
    *("engine", "state", "clock", "handle_etcd", "handle_event", "lease", "leaving", "member_key"),
    *("next_directive", "next_request", "replica", "requests", "session", "upkeep", "watches"),
    *("worker_group", "records/roster"),
    *(
        f"coordinator/{name}"
        for name in (
            *("bootstrap", "cause_counts", "charging", "checkpoint_gate", "closing", "coordinator"),
            *("crash_loop", "data_loss", "election", "failure_policy", "fencing", "final"),
            *("frozen", "joinable", "memory", "quorum", "round_end", "round_writes", "scale_up"),
        )
    ),
    *(
        f"liveness/{name}"
        for name in (
            *(
                "detector_upkeep",
                "failure_detector",
                "leader_link",
                "leave_notices",
                "member_loss",
                "peer_state",
            ),
            *("probes", "self_fencing", "worker_deadlines"),
        )
    ),
)
"""Modules with decisions; the others hold records, keys and texts."""
MAKE = """
import sys
from mutmut.mutation.file_mutation import mutate_file_contents
sys.stdout.write(mutate_file_contents("", sys.stdin.read()).code)
"""
"""Program of mutmut's environment that reads a module and prints all its mutants."""


def environment(cache: Path) -> Path:
    """Return an environment with mutmut."""
    wanted = key((LOCKS / "mutation.txt").read_text())
    found = cache / f"mutation-{wanted}"
    lock = cache / f"mutation-{wanted}.lock"
    with locked(lock):
        if not is_complete(found, wanted):
            forget_idle(lock, IDLE_SECONDS)
            shutil.rmtree(found, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", found], check=True)
            install_locked([found / "bin" / "pip"], LOCKS / "mutation.txt")
            (found / STAMP).write_text(wanted)
    return found


class Score:
    """Mutants of one module, and the stage that killed each; kept for these mutants alone."""

    def __init__(self, python: Path, module: str) -> None:
        dotted = f"{PACKAGE}.{module.replace('/', '.')}"
        source = (ROOT / "rendezvous" / f"{dotted.replace('.', '/')}.py").read_text()
        made = WORK / f"{dotted.removeprefix(PACKAGE + '.')}-{key(source, MUTMUT)}.py"
        if not made.exists():
            # mutmut refuses a working folder without a folder of sources; `lib` counts as one.
            made.write_bytes(
                subprocess.run(
                    [python, "-X", "utf8", "-c", MAKE],
                    input=source.encode(),
                    stdout=subprocess.PIPE,
                    cwd=python.parent.parent,
                    check=True,
                ).stdout
            )
        self.module = module
        self.mutants = mutants(made, dotted)
        self._kept = made.with_suffix(".json")
        self.killed: dict[str, str] = {}
        """Mutant's name -> stage."""
        if self._kept.exists():
            self.killed = json.loads(self._kept.read_text())

    @property
    def survivors(self) -> list[Mutant]:
        return [mutant for mutant in self.mutants if mutant.name not in self.killed]

    def kill(self, mutant: Mutant, stage: str) -> None:
        self.killed[mutant.name] = stage
        self._kept.write_text(json.dumps(self.killed, indent=1, sort_keys=True))


def main() -> None:
    """Try the modules' mutants; print the survivors and each module's score."""
    cache, modules = Path(sys.argv[1]), sys.argv[2:] or list(DECIDE)
    python = environment(cache) / "bin" / "python"
    WORK.mkdir(parents=True, exist_ok=True)
    scores = [Score(python, module) for module in modules]
    try_tables(survivors(scores), results(scores, "tables"))
    try_seeds(survivors(scores), SEEDS, results(scores, "simulation"))
    print_scores(scores)


def survivors(scores: list[Score]) -> list[Mutant]:
    return [mutant for score in scores for mutant in score.survivors]


def results(scores: list[Score], stage: str) -> Report:
    """Return a function that keeps and prints the results of a stage."""
    of = {id(mutant): score for score in scores for mutant in score.mutants}
    left = len(survivors(scores))

    def report(mutant: Mutant, killed: bool) -> None:
        nonlocal left
        left -= 1
        if killed:
            of[id(mutant)].kill(mutant, stage)
        outcome = "killed" if killed else "survived"
        print(f"{stage}, {left} left: {of[id(mutant)].module} {mutant.name}: {outcome}", flush=True)

    return report


def print_scores(scores: list[Score]) -> None:
    """Print each survivor's name, then a table of scores per module."""
    for score in scores:
        for mutant in score.survivors:
            print(score.module, mutant.name)
    rows = [(score.module, len(score.mutants), Counter(score.killed.values())) for score in scores]
    rows.append(("all", sum(row[1] for row in rows), sum((row[2] for row in rows), Counter())))
    print("| module | mutants | killed by tables | by simulation | survived | score |")
    print("|---|---|---|---|---|---|")
    for module, total, killed in rows:
        share = f"{killed.total() / total:.1%}" if total else "no mutants"
        by = (killed["tables"], killed["simulation"], total - killed.total())
        print("|", " | ".join(map(str, (module, total, *by, share))), "|")


if __name__ == "__main__":
    main()
