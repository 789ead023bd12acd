"""Results of the corpus: one verdict for each package, and the page that shows them. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.corpus.compare import Difference
from tests.corpus.job import NODES, ROUNDS
from tests.corpus.manifest import Package, Program, Subject

MOST_SHOWN = 3
MOST_LETTERS = 160

HEAD = """\
# Packages that were compared, cold and warm

Comparison of cold and warm jobs for packages that training scripts import.

## Procedure

`make corpus` runs a job for each package without warm start and with it, at the versions in
`tests/corpus/environments/large.txt`: two nodes, two workers a node, two rounds.

1. All workers import the package and use it a little.
2. In the first round one of them fails then.
3. In the second round one worker of each node ends before the other uses the package again.

These aspects of the cold and the warm job are compared:

| aspect | parts |
|---|---|
| end | exit codes, output, functions called at exit, processes left |
| files | files and folders made and left |
| process | descriptors, threads, children, sizes of thread pools, signal handlers |
| environment | variables, also as C code sees them |
| random values | random numbers with and without a seed |
| values that modules keep | identifiers, generators |
| interpreter | `sys.path`, import hooks, warning filters, logging |

Variation between two cold runs counts as no difference.

The properties in [warm-start.md](warm-start.md#differences-in-a-forked-worker) hold for all
packages and are not listed here. "Left to the worker" are the modules that the guard does not
preload: each worker imports them itself.

## Packages of the corpus
"""

PROGRAMS = """\
## Programs that combine packages

The programs in `tests/corpus/programs` train with several packages at once: loaders with worker
processes, checkpoints, trackers and databases. Rank 1 is killed (SIGKILL) in the first round. All
else is as above.
"""


@dataclass(frozen=True)
class Result:
    """Result of one package's runs; `differences` are the undocumented ones."""

    version: str
    warm: int
    cold_reasons: list[str]
    refused: list[str]
    differences: list[str]
    documented: list[str]
    cold_runs: int
    cold_seconds: float
    warm_seconds: float
    trouble: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def result(
    version: str,
    colds: Sequence[Mapping[str, Any]],
    warm: Mapping[str, Any],
    found: Sequence[Difference],
) -> Result:
    """Summarise the runs and their differences."""
    return Result(
        version=version,
        warm=warm["warm"],
        cold_reasons=[_placed(one, warm["folder"]) for one in warm["cold"]],
        refused=sorted({_placed(one, warm["folder"]) for one in warm["refused"]}),
        differences=[_placed(str(one), warm["folder"]) for one in found if not one.documented],
        documented=sorted({one.documented for one in found if one.documented}),
        cold_runs=len(colds),
        cold_seconds=round(colds[0]["seconds"], 1),
        warm_seconds=round(warm["seconds"], 1),
        trouble=trouble_of(colds[0]),
    )


def _placed(text: str, folder: str) -> str:
    """Return the text with paths that are independent of run and machine."""
    text = re.sub(r"/\S*/site-packages/", "site-packages/", text.replace(folder, "…"))
    return re.sub(r"tmp[a-z0-9_]{8}", "tmp…", text)


def trouble_of(cold: Mapping[str, Any]) -> str:
    """Return the reason that excludes a cold run from comparison; empty if it went as expected."""
    if cold["trouble"]:
        return str(cold["trouble"]).splitlines()[0]
    return "" if not any(cold["exits"]) else f"agents exit with {cold['exits']}"


def page(
    known: Sequence[Package],
    programs: Sequence[Program],
    results: Mapping[str, Result],
    others: str = "",
) -> str:
    """Return the document: the packages, the programs that combine some, then the other ones.

    `others` is the section of the packages that the corpus does not run.
    """
    text = f"{HEAD}\n{_table('package', known, results)}"
    if any(one.name in results for one in programs):
        text += f"\n{PROGRAMS}\n{_table('program', programs, results)}"
    return f"{text}\n{others}" if others else text


def _table(kind: str, known: Sequence[Subject], results: Mapping[str, Result]) -> str:
    """Return the number of subjects that were run, a row for each, and the names of the others."""
    rows = [
        f"| {kind} | version | warm node starts | left to the worker | undocumented differences |",
        "|---|---|---|---|---|",
    ]
    there = [(one.name, results[one.name]) for one in known if one.name in results]
    rows += [_row(name, one) for name, one in there]
    same = sum(1 for _, one in there if one.warm and not one.differences and not one.trouble)
    left = [one.name for one in known if one.name not in results]
    text = (
        f"{len(there)} {kind}s were run; {same} started warm and show no undocumented difference."
    )
    text += "\n\n" + "\n".join(rows) + "\n"
    if left:
        text += f"\nNot run yet: {', '.join(left)}.\n"
    return text


def _row(name: str, one: Result) -> str:
    if one.trouble:
        return f"| {name} | {one.version} | | | its cold run fails: {_cell(one.trouble)} |"
    starts = f"{one.warm} of {NODES * ROUNDS}"
    if one.cold_reasons:
        starts += f" ({_cell('; '.join(one.cold_reasons))})"
    told = _first(one.differences) or "none"
    return f"| {name} | {one.version} | {starts} | {_refused(one.refused)} | {told} |"


def _refused(refused: Sequence[str]) -> str:
    """Return the first refusal; those that only follow from others come last."""
    follows = "which is not preloaded"
    return _first(sorted(refused, key=lambda one: (follows in one, one))) or "nothing"


def _first(texts: Sequence[str]) -> str:
    shown = [_cell(text) for text in texts[:MOST_SHOWN]]
    more = len(texts) - len(shown)
    return "<br>".join(shown) + (f"<br>and {more} more" if more else "")


def _cell(text: str) -> str:
    text = re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= MOST_LETTERS else f"{text[: MOST_LETTERS - 1]}…"
