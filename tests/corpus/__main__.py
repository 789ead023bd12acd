"""`python -m tests.corpus [NAME ...]`: run packages of the corpus and write the page of results.

A name is that of a package, or of a program that combines several. Without names, every one
without a result runs: an interrupted run is resumed. Runs are kept in `build/corpus`, results in
`tests/corpus/measured.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts.environment import LOCKS, ROOT
from tests.corpus.compare import differences
from tests.corpus.environments import cache, environment
from tests.corpus.job import run_job
from tests.corpus.manifest import LISTS, Program, Subject, packages, pins, programs
from tests.corpus.results import Result, page, result, trouble_of
from tests.integration.etcd_server import EtcdServer

MEASURED = Path(__file__).with_name("measured.json")
PAGE = ROOT / "docs" / "warm-start-corpus.md"
OTHERS = Path(__file__).with_name("other_packages.md")
RUNS = ROOT / "build" / "corpus"
MOST_COLD_RUNS = 2
_KEEPING = threading.Lock()


def measured() -> dict[str, Result]:
    """Return the results so far."""
    kept = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    return {name: Result(**one) for name, one in kept.items()}


def document(results: Mapping[str, Result]) -> str:
    """Return the page of these results."""
    return page(packages(), programs(), results, OTHERS.read_text())


def version(package: Subject) -> str:
    """Return the version to which the package's environment pins it; a program's packages' ones."""
    pinned = pins(LOCKS / "dev.txt", LISTS / f"{package.environment}.txt")
    if isinstance(package, Program):
        return ", ".join(f"{pip} {pinned[pip]}" for pip in package.pips)
    return pinned[package.pip]


class Corpus:
    """Package runner; cold runs of an unchanged script are kept and reused."""

    def __init__(self, etcd: EtcdServer) -> None:
        self._interpreters: dict[str, Path] = {}
        self._etcd = etcd

    def measure(self, package: Subject) -> Result:
        """Compare a warm run with cold ones, added while an undocumented difference remains."""
        colds = [self.cold(package, 1)]
        warm = self._run(package, warm=True)
        self._path(package, "warm").write_text(json.dumps(warm))
        found = differences(colds, warm)
        while any(not one.documented for one in found) and len(colds) < MOST_COLD_RUNS:
            if trouble_of(colds[0]):
                break
            colds.append(self.cold(package, len(colds) + 1))
            found = differences(colds, warm)
        return result(version(package), colds, warm, found)

    def cold(self, package: Subject, number: int) -> dict[str, Any]:
        """Return the cold run of that number, from the cache if it is there."""
        path = self._path(package, f"cold-{number}")
        if path.exists():
            kept: dict[str, Any] = json.loads(path.read_text())
            return kept
        run = self._run(package, warm=False)
        path.write_text(json.dumps(run))
        return run

    def _run(self, package: Subject, warm: bool) -> dict[str, Any]:
        name = package.environment
        if name not in self._interpreters:
            self._interpreters[name] = environment(cache(), name) / "bin" / "python"
        return run_job(package, self._interpreters[name], self._etcd, warm).as_json()

    def _path(self, package: Subject, kind: str) -> Path:
        RUNS.mkdir(parents=True, exist_ok=True)
        probe = Path(__file__).with_name("probe.py").read_text()
        # Ignored signals are inherited by all processes; a shell's background jobs have some.
        ignored = [one.name for one in signal.Signals if signal.getsignal(one) is signal.SIG_IGN]
        text = f"{probe}{package.script()}{version(package)}{ignored}"
        key = hashlib.sha256(text.encode()).hexdigest()[:8]
        return RUNS / f"{package.name}-{key}-{kind}.json"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.corpus", description=__doc__)
    parser.add_argument("names", nargs="*", help="packages to run, also such that have a result")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no package after that")
    parser.add_argument("--at-once", type=int, default=2, help="how many packages run at a time")
    parser.add_argument("--cold-only", action="store_true", help="run and keep cold runs alone")
    parser.add_argument("--page", action="store_true", help="write the page again, run nothing")
    return parser.parse_args()


def main() -> int:
    """Run the requested packages; return 1 if one shows an undocumented difference."""
    asked = _arguments()
    results = measured()
    known: list[Subject] = [*packages(), *programs()]
    if asked.page:
        PAGE.write_text(document(results))
        return 0
    unknown = set(asked.names) - {one.name for one in known}
    if unknown:
        sys.exit(f"not in the manifest: {', '.join(sorted(unknown))}")
    todo = [
        one
        for one in known
        if one.name in asked.names
        or (not asked.names and (asked.cold_only or one.name not in results))
    ]
    end = time.monotonic() + asked.seconds
    with tempfile.TemporaryDirectory(prefix="corpus-etcd-") as folder:
        etcd = EtcdServer(Path(folder)).start()
        try:
            corpus = Corpus(etcd)

            def run(package: Subject) -> bool:
                if time.monotonic() > end:
                    return True
                if asked.cold_only:
                    trouble = trouble_of(corpus.cold(package, 1))
                    print(f"{package.name}: {trouble or 'ran cold'}", flush=True)
                    return not trouble
                one = corpus.measure(package)
                _keep(package, one)
                _print_result(package, one)
                return not (one.differences or one.trouble)

            with ThreadPoolExecutor(asked.at_once) as pool:
                return 0 if all(list(pool.map(run, todo))) else 1
        finally:
            etcd.close()


def _keep(package: Subject, one: Result) -> None:
    with _KEEPING:
        results = {**measured(), package.name: one}
        kept = {name: each.as_json() for name, each in sorted(results.items())}
        MEASURED.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
        PAGE.write_text(document(results))


def _print_result(package: Subject, one: Result) -> None:
    verdict = one.trouble or f"{len(one.differences)} undocumented differences"
    print(f"{package.name} {one.version}: {verdict}", flush=True)
    for text in (*one.cold_reasons, *one.refused, *one.differences):
        print(f"    {text[:500]}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
