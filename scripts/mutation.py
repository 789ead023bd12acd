"""Mutation testing of the protocol's decisions: `python -m scripts.mutation CACHE [MODULE ...]`.

mutmut, which has its own environment in the cache, changes one operator, constant, argument or
branch of `elasticjob_rendezvous/protocol` at a time. Table tests try each mutant, then the
simulation tries the survivors. The checkout is never changed: mutants and results are below
`build/mutation`. A stopped run continues, and a later one tries the survivors again.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path

from scripts import environment as env
from scripts.mutation_trials import Mutant, mutants, try_seeds, try_tables

MUTMUT = "mutmut==3.8.1"
WORK = env.ROOT / "build" / "mutation"
KILLED = WORK / "killed.json"
DECIDE = [
    folder + name
    for folder, names in (
        ("", "engine state clock handle_etcd handle_event lease leaving member_key next_directive"),
        ("", "next_request replica requests session upkeep watches worker_group records/roster"),
        ("coordinator/", "bootstrap cause_counts charging checkpoint_gate closing coordinator"),
        ("coordinator/", "crash_loop data_loss election failure_policy fencing final frozen"),
        ("coordinator/", "joinable memory quorum round_end round_writes scale_up"),
        ("liveness/", "detector_upkeep failure_detector leader_link leave_notices member_loss"),
        ("liveness/", "peer_state probes self_fencing worker_deadlines"),
    )
    for name in names.split()
]
"""Modules with decisions; the others hold records, keys and texts."""
MAKE = """
import sys
from mutmut.mutation.file_mutation import mutate_file_contents
sys.stdout.write(mutate_file_contents("", sys.stdin.read()).code)
"""
"""Program of mutmut's environment that reads a module and prints all its mutants."""


def environment(cache: Path) -> Path:
    """Return an environment with mutmut."""
    wanted = env.key((env.LOCKS / "mutation.txt").read_text())
    found = cache / f"mutation-{wanted}"
    lock = cache / f"mutation-{wanted}.lock"
    with env.locked(lock):
        if not env.is_complete(found, wanted):
            env.forget_idle(lock, env.IDLE_SECONDS)
            shutil.rmtree(found, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", found], check=True)
            env.install_locked([found / "bin" / "pip"], env.LOCKS / "mutation.txt")
            (found / env.STAMP).write_text(wanted)
    return found


def made(found: Path, module: str) -> list[Mutant]:
    """Return the mutants of a module, made once for each version of it."""
    source = (env.ROOT / f"rendezvous/elasticjob_rendezvous/protocol/{module}.py").read_bytes()
    path = WORK / f"{module.replace('/', '.')}-{env.key(source.decode(), found.name)}.py"
    if not path.exists():
        # mutmut refuses a working folder without a folder of sources; `lib` counts as one.
        make = [str(found / "bin" / "python"), "-X", "utf8", "-c", MAKE]
        run = subprocess.run(make, input=source, stdout=subprocess.PIPE, cwd=found, check=True)
        path.write_bytes(run.stdout)
    return mutants(path, module)


def main() -> None:
    """Try the mutants of these modules, else of all that decide; print each module's score."""
    found, modules = environment(Path(sys.argv[1])), sys.argv[2:] or DECIDE
    WORK.mkdir(parents=True, exist_ok=True)
    killed = json.loads(KILLED.read_text()) if KILLED.exists() else {}
    every = [mutant for module in modules for mutant in made(found, module)]
    for stage, attempt in (("tables", try_tables), ("simulation", try_seeds)):
        alive = [mutant for mutant in every if mutant.id not in killed]
        attempt(alive, partial(keep, killed, stage))
    report(every, killed)


def keep(killed: dict[str, str], stage: str, mutant: Mutant, dead: bool) -> None:
    """Print and keep the result of a stage for one mutant."""
    result = "killed" if dead else "survived"
    print(f"{stage}: {mutant.module} {mutant.name} {result}", flush=True)
    if dead:
        killed[mutant.id] = stage
        KILLED.write_text(json.dumps(killed, indent=1, sort_keys=True))


def report(every: list[Mutant], killed: dict[str, str]) -> None:
    """Print each survivor's name, then a table of scores per module."""
    scores: dict[str, Counter[str]] = {}
    for mutant in every:
        stage = killed.get(mutant.id, "survived")
        scores.setdefault(mutant.module, Counter())[stage] += 1
        if stage == "survived":
            print(mutant.module, mutant.name)
    print("| module | mutants | killed by tables | by simulation | survived | score |")
    print("|---|---|---|---|---|---|")
    for module, score in [*scores.items(), ("all", sum(scores.values(), Counter()))]:
        row = (score.total(), score["tables"], score["simulation"], score["survived"])
        share = 1 - score["survived"] / score.total() if score.total() else 1.0
        print("|", " | ".join(map(str, (module, *row, f"{share:.1%}"))), "|")


if __name__ == "__main__":
    main()
