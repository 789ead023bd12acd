"""Trials of mutants, each in a forked process: by the table tests and by the simulation.

A trial gives one function of the imported product the code of a mutant. The mutant is killed if a
test fails, a seed violates an invariant, or either needs far more processor time than without it.
"""

from __future__ import annotations

import ast
import importlib
import math
import os
import resource
import signal
import sys
import time
import traceback
import types
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.sim.run import simulate

PACKAGE = "elasticjob_rendezvous.protocol"
TABLES = "tests/unit/rendezvous/protocol"
PROCESSES, SEEDS = 2, 200
SEED_SECONDS = 20.0
"""Processor time after which a seed has no end; without a mutant the longest takes one."""
TEST_SECONDS, TEST_FACTOR = 5.0, 10.0
"""Processor time after which a test has no end, also as a multiple of its time without a mutant."""
MEMORY_BYTES = 4 << 30
SURVIVED, KILLED, BROKEN = range(3)

Report = Callable[["Mutant", bool], None]
"""Receives each mutant with the result of its trial: True if it was killed."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """Changed copy of one function.

    `name` is mutmut's: `x_name__mutmut_1` for a module's function, `xǁClassǁname__mutmut_1` for a
    method; `id` also names the version of the module.
    """

    module: str
    name: str
    id: str
    definition: ast.FunctionDef

    @property
    def imported(self) -> types.ModuleType:
        return importlib.import_module(f"{PACKAGE}.{self.module.replace('/', '.')}")

    def original(self) -> types.FunctionType:
        """Return the product's function of which this is a copy."""
        found: Any = self.imported
        plain = self.name.rpartition("__mutmut_")[0]
        for part in plain.removeprefix("x_").removeprefix("xǁ").split("ǁ"):
            found = vars(found)[part]
        found = getattr(found, "__func__", found)  # of a static or a class method
        assert isinstance(found, types.FunctionType), f"{plain} in {self.module}: {found!r}"
        return found

    def replace(self) -> None:
        """Give the product's function, in this process, the code and defaults of this copy."""
        self.definition.decorator_list = []
        namespace = dict(vars(self.imported))
        tree = ast.Module([self.definition], type_ignores=[])
        exec(compile(tree, self.name, "exec"), namespace)  # annotations stay texts, as here
        copy, function = namespace[self.name], self.original()
        function.__code__ = copy.__code__
        function.__defaults__, function.__kwdefaults__ = copy.__defaults__, copy.__kwdefaults__


def mutants(path: Path, module: str) -> list[Mutant]:
    """Return the mutants in a file that mutmut made from a module."""
    return [
        Mutant(module, node.name, f"{path.stem} {node.name}", node)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.rpartition("__mutmut_")[2].isdigit()
    ]


def try_seeds(untried: list[Mutant], report: Report) -> None:
    """Simulate each mutant until a seed violates an invariant."""

    def fails(_: Mutant) -> bool:
        for seed in range(SEEDS):
            _allow(SEED_SECONDS)
            if simulate(seed).violation is not None:
                return True
        return False

    _try(untried, fails, report)


def try_tables(untried: list[Mutant], report: Report) -> None:
    """Run the table tests that reach each mutant until one fails, the fastest first."""
    options = ["-qq", "--no-header", "--no-summary", "-s", "-p", "no:cacheprovider", TABLES]
    if code := pytest.main(options, plugins=[_Tables(untried, report)]):
        raise RuntimeError(f"pytest ended with {code!r}: its messages are above")


class _Tables:
    """Plugin of pytest that runs the collected tests for each mutant, instead of once."""

    def __init__(self, untried: list[Mutant], report: Report) -> None:
        self.untried = untried
        self.report = report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        tests = _reaching({mutant.original() for mutant in self.untried}, session.items)

        def fails(mutant: Mutant) -> bool:
            for seconds, item in tests.get(mutant.original(), ()):
                _allow(TEST_SECONDS + TEST_FACTOR * seconds)
                if not _passes(item):
                    return True
            return False

        _try(self.untried, fails, self.report)
        return True


def _reaching(
    functions: Iterable[types.FunctionType], items: list[pytest.Item]
) -> dict[types.FunctionType, list[tuple[float, pytest.Item]]]:
    """Return the tests that call each function, with their processor times, the fastest first."""
    by_code = {id(function.__code__): function for function in functions}
    tests: dict[types.FunctionType, list[tuple[float, pytest.Item]]] = defaultdict(list)
    for item in items:
        called: set[types.FunctionType] = set()

        def note(frame: types.FrameType, event: str, _: object, called: Any = called) -> None:
            if event == "call" and id(frame.f_code) in by_code:
                called.add(by_code[id(frame.f_code)])

        begun = time.process_time()
        sys.setprofile(note)
        passes = _passes(item)
        sys.setprofile(None)
        if not passes:
            raise RuntimeError(f"{item.nodeid} fails without a mutant")
        for function in called:
            tests[function].append((time.process_time() - begun, item))
    return {each: sorted(found, key=lambda test: test[0]) for each, found in tests.items()}


def _passes(item: pytest.Item) -> bool:
    return not any(report.failed for report in runtestprotocol(item, log=False))


def _try(untried: list[Mutant], fails: Callable[[Mutant], bool], report: Report) -> None:
    """Report each mutant, and True if it fails, from processes forked for one mutant each."""
    waiting, running = iter(untried), dict[int, Mutant]()
    while True:
        for mutant in islice(waiting, PROCESSES - len(running)):
            running[_forked(mutant, fails)] = mutant
        if not running:
            return
        pid, status = os.wait()
        code, mutant = os.waitstatus_to_exitcode(status), running.pop(pid)
        if code not in (SURVIVED, KILLED, -signal.SIGXCPU):
            raise RuntimeError(f"the trial of {mutant.name} ended with {code}")
        report(mutant, code != SURVIVED)


def _forked(mutant: Mutant, fails: Callable[[Mutant], bool]) -> int:
    """Return the id of a process that tries a mutant and exits with the result."""
    if pid := os.fork():
        return pid
    result = BROKEN
    try:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        mutant.replace()
        result = KILLED if fails(mutant) else SURVIVED
    except MemoryError:
        result = KILLED
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(result)


def _allow(seconds: float) -> None:
    """End this process once it has used this much more processor time."""
    until = math.ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))
