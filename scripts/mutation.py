"""Mutation testing of the protocol's decisions: `python -m scripts.mutation CACHE [MODULE ...]`.

Each rule of `elasticjob_rendezvous/core` is mutated, one change at a time, and the table tests of
the rendezvous must fail. mutmut has its own environment in the cache: nothing else needs it. It
works on a copy below `build/mutation`, so the checkout is never changed, and it resumes after an
interruption. Without arguments it mutates all decision modules, which takes a night.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from scripts.environment import ROOT, dependencies, is_complete, key, locked, site_packages

MUTMUT = "mutmut==3.8.1"
CORE = "elasticjob_rendezvous/core"
STAMP = ".complete"
DECIDE = (
    "absence", "answers", "attendance", "backoff", "bootstrap", "census", "closing", "counts",
    "crashes", "crew", "dataloss", "deciding", "departure", "directing", "ending", "engine",
    "excuses", "farewells", "fencing", "final", "frozen", "inflight", "inquiries", "intake",
    "joinable", "judging", "leadership", "lease", "leaving", "newcomers", "own", "peers",
    "requesting", "retention", "roster", "rounds", "safety", "saving", "sessions", "silenced",
    "succession", "tending", "timers", "verdicts", "view", "vouching", "watching",
)  # fmt: skip
"""Modules with decisions; the others hold records, keys and texts."""
EDGE = re.compile(
    r"(?:import|from) (?:elasticjob_(?:operator|cli|agent)|torch|grpc|tests.integration"
    r"|elasticjob_rendezvous\.(?!core))|elasticjob_rendezvous import"
)
"""Imports of tests to leave out: they start servers or threads, or do not cover the rules."""
CONFIG = """
[mutmut]
paths_to_mutate={modules}
tests_dir=tests/unit/rendezvous
also_copy=
    elasticjob_rendezvous
    elasticjob_agent
    elasticjob
    tests
"""


def environment(cache: Path) -> Path:
    """Return an environment with mutmut and the project's dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    deps = dependencies(cache, project)
    wanted = key(MUTMUT, deps)
    found = cache / f"mutation-{wanted}"
    with locked(cache / f"mutation-{wanted}.lock"):
        if not is_complete(found, wanted):
            shutil.rmtree(found, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", found], check=True)
            pip = [str(found / "bin" / "pip"), "--disable-pip-version-check", "--no-input"]
            subprocess.run([*pip, "install", "--quiet", MUTMUT], check=True)
            (site_packages(found) / "dependencies.pth").write_text(f"{site_packages(deps)}\n")
            (found / STAMP).write_text(wanted)
    return found


def copy(work: Path, modules: list[str]) -> None:
    """Copy the packages and tests into the layout they are imported from."""
    ignored = shutil.ignore_patterns("__pycache__")
    for source in ("elasticjob", "elasticjob_agent", "elasticjob_rendezvous"):
        shutil.copytree(ROOT / "sidecar" / source, work / source, ignore=ignored)
    for folder in ("tests/sim", "tests/unit/rendezvous"):
        shutil.copytree(ROOT / folder, work / folder, ignore=ignored)
    for test in (work / "tests/unit/rendezvous").glob("test_*.py"):
        if EDGE.search(test.read_text()):
            test.unlink()
    paths = "".join(f"\n    {CORE}/{module}.py" for module in modules)
    (work / "setup.cfg").write_text(CONFIG.format(modules=paths))
    (work / "pytest.ini").write_text("[pytest]\naddopts = -p no:xdist -p no:cacheprovider\n")


def main() -> None:
    """Run the mutation tests and print the share of killed mutants of each module."""
    cache, modules = Path(sys.argv[1]), sys.argv[2:] or list(DECIDE)
    mutmut = environment(cache) / "bin" / "mutmut"
    work = ROOT / "build" / "mutation" / "-".join(modules)[:80]
    if not work.exists():
        copy(work, modules)
    subprocess.run([mutmut, "run", "--max-children", "2"], cwd=work, check=False)
    results = subprocess.run(
        [mutmut, "results", "--all", "true"], cwd=work, check=True, capture_output=True, text=True
    )
    told: dict[str, list[str]] = {}
    for line in results.stdout.splitlines():
        name, _, status = line.strip().rpartition(": ")
        if ".core." in name:
            told.setdefault(name.split(".core.")[1].split(".")[0], []).append(status)
            if status in ("survived", "no tests"):
                print(line.strip())
    for module, statuses in sorted(told.items()):
        tried = [status for status in statuses if status != "not checked"]
        caught = sum(status in ("killed", "timeout") for status in tried)
        share = f"{caught / len(tried):.1%}" if tried else "none tried"
        print(f"{module:12} {caught:4} of {len(tried):4} killed: {share}; {len(statuses)} in total")


if __name__ == "__main__":
    main()
