"""Simulation of mutants: the stage of mutation testing before and after the table tests.

`python -m scripts.mutation_simulation WORK [--seeds N]` reads mutmut's mutants and results below
WORK/mutants, gives a function of the imported product the code of one mutant at a time, in a child
process, and simulates seeds until an invariant is violated. Mutants that table tests kill are left
out. Results are kept in WORK/simulation.json; a stopped run continues there, and a run with more
seeds tries the survivors again.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import multiprocessing
import signal
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.sim.run import simulate

PACKAGE = "elasticjob_rendezvous.protocol"
ALIVE = (None, 0, 33)
"""Exit codes in mutmut's results of mutants that are untried, survived, or have no tests."""
MUTANT_SECONDS = 120
KILLED_BY_TIME = -1
"""Result of a mutant whose simulation does not end."""


def main() -> None:
    """Simulate every mutant that no table test killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    results = simulated(options.work)
    todo = []
    for name, exit_code in statuses(options.work):
        known = results.get(name, {"killed": False, "seeds": 0})
        if exit_code in ALIVE and not known["killed"]:
            first = known["seeds"]
            if first < options.seeds:
                todo.append((options.work, name, first, options.seeds))
    for module in {name.rpartition(".")[0] for _, name, _, _ in todo}:
        _definitions(options.work, module)  # once, for all children
    context = multiprocessing.get_context("fork")
    with context.Pool(options.jobs, maxtasksperchild=1) as pool:
        for number, (name, seed) in enumerate(pool.imap_unordered(_try, todo, chunksize=1), 1):
            results[name] = {"killed": seed is not None, "seed": seed, "seeds": options.seeds}
            outcome = "survived" if seed is None else f"killed by seed {seed}"
            print(f"{number}/{len(todo)} {name.removeprefix(PACKAGE + '.')}: {outcome}", flush=True)
            if number % 20 == 0 or number == len(todo):
                _kept(options.work).write_text(json.dumps(results, indent=1, sort_keys=True))


def simulated(work: Path) -> dict[str, dict[str, Any]]:
    """Return the simulation's results by mutant."""
    return json.loads(_kept(work).read_text()) if _kept(work).exists() else {}


def _kept(work: Path) -> Path:
    return work / "simulation.json"


def statuses(work: Path) -> Iterator[tuple[str, int | None]]:
    """Yield each mutant's name and mutmut's exit code of it; None if it was not tried."""
    for path in sorted((work / "mutants").rglob("*.py.meta")):
        yield from json.loads(path.read_text())["exit_code_by_key"].items()


def _try(task: tuple[Path, str, int, int]) -> tuple[str, int | None]:
    """Return the first seed with a violation, `KILLED_BY_TIME`, or None."""
    work, name, first, seeds = task
    replace_code(work, name)
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(MUTANT_SECONDS)
    for seed in range(first, seeds):
        violation = simulate(seed).violation
        if violation is not None:
            late = isinstance(violation.__cause__, TimeoutError)
            return name, KILLED_BY_TIME if late else seed
    signal.alarm(0)
    return name, None


def _out_of_time(*_: object) -> None:
    raise TimeoutError(f"a mutant's simulation took over {MUTANT_SECONDS} s")


def replace_code(work: Path, name: str) -> None:
    """Give the mutated function, in this process, the code and defaults of the mutant."""
    module_name, _, mangled = name.rpartition(".")
    module = importlib.import_module(module_name)
    definition = _definitions(work, module_name)[mangled]
    definition.decorator_list = []
    namespace = dict(vars(module))
    tree = ast.Module([definition], type_ignores=[])
    exec(compile(tree, mangled, "exec"), namespace)  # annotations stay texts, as in this module
    mutant = namespace[definition.name]
    target = _target(module, mangled)
    target.__code__ = mutant.__code__
    target.__defaults__, target.__kwdefaults__ = mutant.__defaults__, mutant.__kwdefaults__


@cache
def _definitions(work: Path, module_name: str) -> dict[str, ast.FunctionDef]:
    """Return all mutants of a module by name; large modules take a second to parse."""
    source = work / "mutants" / f"{module_name.replace('.', '/')}.py"
    nodes = ast.walk(ast.parse(source.read_text()))
    return {node.name: node for node in nodes if isinstance(node, ast.FunctionDef)}


def _target(module: types.ModuleType, mangled: str) -> types.FunctionType:
    """Return the product's function: `x_name` is a module's, `xǁClassǁname` a method."""
    plain = mangled.rpartition("__mutmut_")[0]
    if plain.startswith("xǁ"):
        _, class_name, name = plain.split("ǁ")
        found: Any = vars(vars(module)[class_name])[name]
    else:
        found = vars(module)[plain.removeprefix("x_")]
    if isinstance(found, property):
        found = found.fget
    found = getattr(found, "__func__", found)
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    if not isinstance(found, types.FunctionType):
        raise TypeError(f"{module.__name__}.{plain} is no function: {found!r}")
    return found


if __name__ == "__main__":
    main()
