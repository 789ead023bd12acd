"""Mutation testing of the protocol's decisions: `python -m scripts.mutation CACHE [MODULE ...]`.

mutmut changes one operator, constant, argument or branch of `elasticjob_rendezvous/protocol` at a
time and runs the table tests that reach it; the simulation tries the mutants that no table kills.
mutmut has its own environment in the cache; nothing else needs it. It works on a copy below
`build/mutation`, so the checkout is never changed, and a stopped run continues. Without modules it
takes all modules that decide: hours.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

from scripts.environment import (
    IDLE_SECONDS,
    LOCKS,
    ROOT,
    dependencies,
    forget_idle,
    install_locked,
    is_complete,
    key,
    locked,
    site_packages,
)
from scripts.mutation_simulation import ALIVE, PACKAGE, simulated, statuses

MUTMUT = "mutmut==3.8.1"
PROTOCOL = "elasticjob_rendezvous/protocol"
SOURCES = (
    *("rendezvous/elasticjob_rendezvous", "sdk/elasticjob"),
    *("sidecar/elasticjob_agent", "sidecar/elasticjob_launcher"),
)
STAMP = ".complete"
FIRST_SEEDS, SEEDS = 20, 200
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
EDGE = re.compile(
    r"(?:import|from) (?:elasticjob_(?:operator|cli|agent|launcher)|torch|grpc|tests.integration"
    r"|elasticjob_rendezvous\.(?!protocol))|elasticjob_rendezvous import"
)
"""Imports of tests to leave out: they start servers or threads, or do not cover the rules."""
CONFIG = """
[mutmut]
paths_to_mutate={modules}
tests_dir=tests/unit/rendezvous
also_copy=
    elasticjob_rendezvous
    elasticjob_agent
    elasticjob_launcher
    elasticjob
    tests
"""


def environment(cache: Path) -> Path:
    """Return an environment with mutmut and the project's dependencies."""
    deps = dependencies(cache)
    wanted = key((LOCKS / "mutation.txt").read_text(), deps)
    found = cache / f"mutation-{wanted}"
    lock = cache / f"mutation-{wanted}.lock"
    with locked(lock):
        if not is_complete(found, wanted):
            forget_idle(lock, IDLE_SECONDS)
            shutil.rmtree(found, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", found], check=True)
            install_locked([found / "bin" / "pip"], LOCKS / "mutation.txt")
            (site_packages(found) / "dependencies.pth").write_text(f"{site_packages(deps)}\n")
            (found / STAMP).write_text(wanted)
    return found


def copy(work: Path, modules: list[str]) -> None:
    """Copy the packages and tests into the layout they are imported from."""
    ignored = shutil.ignore_patterns("__pycache__")
    for source in SOURCES:
        shutil.copytree(ROOT / source, work / Path(source).name, ignore=ignored)
    for folder in ("tests/sim", "tests/unit/rendezvous"):
        shutil.copytree(ROOT / folder, work / folder, ignore=ignored)
    for test in (work / "tests/unit/rendezvous").rglob("test_*.py"):
        if EDGE.search(test.read_text()):
            test.unlink()
    paths = "".join(f"\n    {PROTOCOL}/{module}.py" for module in modules)
    (work / "setup.cfg").write_text(CONFIG.format(modules=paths))
    (work / "pytest.ini").write_text("[pytest]\naddopts = -p no:xdist -p no:cacheprovider\n")


def main() -> None:
    """Test the modules; print the survivors and each module's score.

    A few seeds come first: they kill most mutants sooner than the table tests do.
    """
    cache, modules = Path(sys.argv[1]), sys.argv[2:] or list(DECIDE)
    mutmut = environment(cache) / "bin" / "mutmut"
    work = ROOT / "build" / "mutation" / "-".join(modules).replace("/", ".")[:80]
    if not work.exists():
        copy(work, modules)
        # Without a mutant of this name mutmut only makes the mutants.
        subprocess.run([mutmut, "run", "none"], cwd=work, check=False)
    simulate(work, FIRST_SEEDS)
    killed = {name for name, result in simulated(work).items() if result["killed"]}
    alive = [name for name, exit_code in statuses(work) if exit_code is None and name not in killed]
    if alive:
        subprocess.run([mutmut, "run", "--max-children", "2", *alive], cwd=work, check=False)
    simulate(work, SEEDS)
    report(work)


def simulate(work: Path, seeds: int) -> None:
    """Simulate the mutants that are alive."""
    command = [sys.executable, "-m", "scripts.mutation_simulation", str(work), f"--seeds={seeds}"]
    subprocess.run(command, cwd=ROOT, check=True)


def report(work: Path) -> None:
    """Print each survivor's name, then a table of scores per module."""
    results = simulated(work)
    scores: dict[str, Counter[str]] = {}
    for name, exit_code in statuses(work):
        module = name.removeprefix(f"{PACKAGE}.").rpartition(".")[0].replace(".", "/")
        if exit_code not in ALIVE:
            result = "tables"
        elif results.get(name, {}).get("killed"):
            result = "simulation"
        elif exit_code is None:
            result = "untried"
        else:
            result = "survived"
            print(name)
        scores.setdefault(module, Counter())[result] += 1
    print("| module | mutants | killed by tables | by simulation | survived | score |")
    print("|---|---|---|---|---|---|")
    for module, score in [*sorted(scores.items()), ("all", sum(scores.values(), Counter()))]:
        killed, tried = score["tables"] + score["simulation"], score.total() - score["untried"]
        share = f"{killed / tried:.1%}" if tried else "not tried"
        row = (module, tried, score["tables"], score["simulation"], score["survived"], share)
        print("|", " | ".join(map(str, row)), "|")


if __name__ == "__main__":
    main()
