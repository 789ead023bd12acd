"""Recovery time of a gang after a fault: `python -m bench.recovery`.

Compares ours with torchrun, with the same worker script: ours with its defaults, which start
workers warm, and cold, as torchrun does. The time lasts from the fault (for a join: from the
newcomer's start) until every live worker has completed its first all-reduce in the new world; the
pause is the part of it without training. For ours the parts are included, as the rendezvous
recorded them. The numbers and a plot go to build/bench/recovery.json and .png. A full run takes
about two hours, nearly all of them torchrun's: `--peers etcd --repeat-peers 1 --gangs 4` takes ten
minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.faults import Fault, Outcome, run_peer
from bench.imports import imports_seconds
from bench.machine import machine_facts
from bench.numbers import median_or_none, ratio
from bench.peers.commands import OURS, Peer, peers
from bench.plot import plot_recovery
from bench.results import keep
from bench.settings import OUR_ETCD_VERSION, OUTPUT, PEERS_ETCD_VERSION

GANGS = (4, 16)
LARGE_GANGS_PEER = "etcd"
"""Only peer measured in gangs larger than the first size."""


@dataclass(slots=True)
class Measured:
    """All repeats of one fault under one peer, in gangs of one size."""

    peer: Peer
    gang: int
    fault: Fault
    outcomes: list[Outcome] = field(default_factory=list)

    def seconds(self) -> float | None:
        return median_or_none([outcome.seconds for outcome in self.outcomes])

    def to_json(self) -> dict[str, object]:
        errors = [outcome.error for outcome in self.outcomes if outcome.error]
        pauses = [outcome.pause for outcome in self.outcomes if outcome.pause is not None]
        phases = dict.fromkeys(name for outcome in self.outcomes for name in outcome.split)
        return {
            "peer": self.peer.name,
            "gang": self.gang,
            "fault": self.fault,
            "mode": self.peer.mode,
            "seconds": self.seconds(),
            "pause": median_or_none(pauses) if pauses else None,
            "split": {
                phase: median_or_none([outcome.split.get(phase, 0.0) for outcome in self.outcomes])
                for phase in phases
            },
            "error": errors[0] if errors else None,
            "runs": [outcome.seconds for outcome in self.outcomes],
        }


Table = dict[tuple[str, int, Fault], Measured]


def measure(chosen: Sequence[Peer], options: argparse.Namespace, logs: Path) -> Table:
    """Run every repeat of every peer, sequentially, so that gangs do not disturb each other."""
    faults = [fault for fault in Fault if str(fault) in options.faults]
    table: Table = {}
    for peer in chosen:
        repeat = options.repeat_ours if peer.ours else options.repeat_peers
        for size in options.gangs:
            if size != options.gangs[0] and not (peer.ours or peer.name == LARGE_GANGS_PEER):
                continue
            cells = {fault: Measured(peer, size, fault) for fault in faults}
            table.update({(peer.name, size, fault): cell for fault, cell in cells.items()})
            for turn in range(repeat):
                for fault, outcome in run_peer(
                    peer, size, faults, options.limit_seconds, logs, turn
                ):
                    cells[fault].outcomes.append(outcome)
                    name = f"[{turn + 1}/{repeat}] {peer.name} of {size} {fault}"
                    print(f"{name}: {_shown(outcome)}", flush=True)
    return table


def _shown(outcome: Outcome) -> str:
    if outcome.seconds is None:
        return f"never: {outcome.error}"
    paused = "" if outcome.pause is None else f", paused {outcome.pause:.2f} s"
    phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in outcome.split.items())
    return f"{outcome.seconds:.2f} s{paused}{f' ({phases})' if phases else ''}"


def ratios(table: Table) -> dict[str, float | None]:
    """Return our speed-up by `<peer>/<gang>/<fault>/<mode of ours>`; None if the peer never
    recovered."""
    ours = [cell for cell in table.values() if cell.peer.ours]
    return {
        f"{cell.peer.name}/{cell.gang}/{cell.fault}/{own.peer.mode}": ratio(
            cell.seconds(), own.seconds()
        )
        for cell in table.values()
        if not cell.peer.ours
        for own in ours
        if (own.gang, own.fault) == (cell.gang, cell.fault)
    }


def parse(arguments: Sequence[str] | None, known: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    theirs = [name for name in known if not name.startswith(OURS)]
    faults = [str(fault) for fault in Fault]
    parser.add_argument("--peers", nargs="*", choices=theirs, default=theirs)
    parser.add_argument("--faults", nargs="+", choices=faults, default=faults)
    parser.add_argument("--gangs", nargs="+", type=int, default=GANGS, metavar="N")
    parser.add_argument("--without-ours", action="store_true", help="measure only the peers")
    parser.add_argument("--repeat-ours", type=int, default=10)
    parser.add_argument("--repeat-peers", type=int, default=3)
    parser.add_argument("--limit-seconds", type=float, default=120.0, help="timeout: `never`")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (build/bench)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 if ours did not recover from a fault; a peer's failure is only reported."""
    known = peers(OUR_ETCD_VERSION, PEERS_ETCD_VERSION)
    options = parse(arguments, list(known))
    ours = [] if options.without_ours else [name for name, peer in known.items() if peer.ours]
    logs = options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    facts = machine_facts()
    imports = {str(size): imports_seconds(size) for size in options.gangs}
    for size, seconds in imports.items():
        print(f"{size} concurrent imports of torch: {seconds:.2f} s", flush=True)
    table = measure([known[name] for name in (*ours, *options.peers)], options, logs)
    rows = [cell.to_json() for cell in table.values()]
    content = {
        "benchmark": "recovery",
        "machine": facts,
        "limit_seconds": options.limit_seconds,
        "imports_seconds": imports,
        "ratios": ratios(table),
        "results": rows,
    }
    keep(options.output / "recovery.json", content)
    plot_recovery(rows, options.limit_seconds, options.output / "recovery.png")
    print(f"written: {options.output / 'recovery.json'} and recovery.png")
    return int(any(cell.seconds() is None for cell in table.values() if cell.peer.ours))


if __name__ == "__main__":
    sys.exit(main())
