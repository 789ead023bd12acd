"""Time for N members starting at once to agree on their ranks: `python -m bench.rendezvous`.

Compares ours with torch's backends, interleaved in one run. The numbers and a plot go to
build/bench/rendezvous.json and .png.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.backends import PEERS, Backend, arena, preload
from bench.etcd_proc import EtcdFailed
from bench.machine import machine_facts
from bench.numbers import median_or_none, ratio
from bench.plot import plot_rendezvous
from bench.rendezvous_case import CaseFailed, CaseResult, run_case
from bench.results import keep
from bench.settings import OUTPUT, ProgramMissing

SIZES = (8, 16, 32, 64, 128, 256)


@dataclass(slots=True)
class Measured:
    """All repeats of one backend at one size."""

    backend: Backend
    members: int
    runs: list[CaseResult] = field(default_factory=list)
    error: str | None = None  # reason if there is no number

    def wall_seconds(self) -> float | None:
        return None if self.error else median_or_none([run.wall_seconds for run in self.runs])

    def requests_per_member(self) -> float | None:
        counts = [sum(run.requests.values()) if run.requests else None for run in self.runs]
        total = None if self.error else median_or_none(counts)
        return None if total is None else round(total / self.members, 2)

    def to_json(self) -> dict[str, object]:
        return {
            "backend": self.backend,
            "members": self.members,
            "wall_seconds": self.wall_seconds(),
            "cpu_seconds": median_or_none([run.cpu_seconds for run in self.runs]),
            "requests_per_member": self.requests_per_member(),
            "error": self.error,
            "runs": [asdict(run) for run in self.runs],
        }


Key = tuple[Backend, int]


def measure(
    backends: Sequence[Backend],
    sizes: Sequence[int],
    repeat: int,
    limit_seconds: float,
    logs: Path,
    with_making: bool,
) -> dict[Key, Measured]:
    """Run every case, backends interleaved so that a slow phase of the machine affects them all."""
    table = {(b, n): Measured(b, n) for n in sizes for b in backends}
    for turn in range(repeat):
        for (backend, members), cell in table.items():
            if cell.error:
                continue
            print(f"[{turn + 1}/{repeat}] {backend} with {members} members: ", end="", flush=True)
            log = logs / f"rendezvous-{backend}-{members}-{turn}.log"
            log.unlink(missing_ok=True)
            try:
                with arena(backend, members) as place:
                    run = run_case(
                        members, place.make, place.requests, limit_seconds, log, with_making
                    )
            except (CaseFailed, EtcdFailed, ProgramMissing) as failure:
                cell.error = str(failure)
                print(f"failed: {failure}", flush=True)
            else:
                cell.runs.append(run)
                print(f"{run.wall_seconds:.3f} s", flush=True)
    return table


def summary(table: dict[Key, Measured]) -> dict[str, object]:
    """Return the content of rendezvous.json without the machine's description."""
    ours = {n: cell for (backend, n), cell in table.items() if backend is Backend.ELASTICJOB}
    walls = {n: cell.wall_seconds() for n, cell in ours.items()}
    return {
        "ratios": {
            f"{backend}/{n}": ratio(cell.wall_seconds(), walls.get(n))
            for (backend, n), cell in table.items()
            if backend is not Backend.ELASTICJOB
        },
        "requests_per_member": {str(n): cell.requests_per_member() for n, cell in ours.items()},
        "results": [cell.to_json() for cell in table.values()],
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.rendezvous", description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), metavar="N")
    names = [str(peer) for peer in PEERS]
    parser.add_argument("--peers", nargs="*", choices=names, default=names)
    parser.add_argument("--without-ours", action="store_true", help="measure only the peers")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--limit-seconds", type=float, default=120.0, help="timeout per case")
    parser.add_argument(
        "--with-making",
        action="store_true",
        help="include the creation of handlers (connecting to the server) for all backends",
    )
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (build/bench)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 if ours has no number for a size; a peer's failure is only reported."""
    options = parse(arguments)
    ours = [] if options.without_ours else [Backend.ELASTICJOB]
    backends = [*ours, *(Backend(name) for name in options.peers)]
    logs = options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    facts = machine_facts()
    preload()
    with_making = options.with_making
    table = measure(
        backends, options.sizes, options.repeat, options.limit_seconds, logs, with_making
    )
    timed = "making the handler and next_rendezvous" if with_making else "next_rendezvous"
    content = {"benchmark": "rendezvous", "timed": timed, "machine": facts, **summary(table)}
    keep(options.output / "rendezvous.json", content)
    plot_rendezvous([cell.to_json() for cell in table.values()], options.output / "rendezvous.png")
    print(f"written: {options.output / 'rendezvous.json'} and rendezvous.png")
    return int(any(cell.error for (backend, _), cell in table.items() if backend in ours))


if __name__ == "__main__":
    sys.exit(main())
