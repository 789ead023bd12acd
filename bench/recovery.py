"""`python -m bench.recovery`: how long a gang of four is away after a fault.

Ours against torchrun, the same worker script under all. From the fault (for a join: from the
newcomer's start) to the moment when every live worker has done its first all-reduce in the new
world. The numbers and a plot of them go to build/bench/recovery.json and .png. About 12 minutes,
nearly all of them torchrun's: `--peers etcd --repeat-ours 1` takes five.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.faults import Fault, Outcome, run_peer
from bench.machine import machine_facts
from bench.numbers import median_or_none, ratio
from bench.peers.commands import Peer, peers
from bench.plot import plot_recovery
from bench.settings import OUR_ETCD_VERSION, OUTPUT, PEERS_ETCD_VERSION

OURS = "elasticjob"
MODE = "cold"  # a new interpreter for each worker


@dataclass(slots=True)
class Measured:
    """All repeats of one fault under one peer."""

    peer: str
    fault: Fault
    outcomes: list[Outcome] = field(default_factory=list)

    def seconds(self) -> float | None:
        return median_or_none([outcome.seconds for outcome in self.outcomes])

    def to_json(self) -> dict[str, object]:
        errors = [outcome.error for outcome in self.outcomes if outcome.error]
        return {
            "peer": self.peer,
            "fault": self.fault,
            "mode": MODE,
            "seconds": self.seconds(),
            "error": errors[0] if errors else None,
            "runs": [outcome.seconds for outcome in self.outcomes],
        }


Table = dict[tuple[str, Fault], Measured]


def measure(
    chosen: Sequence[Peer], faults: Sequence[Fault], options: argparse.Namespace, logs: Path
) -> Table:
    """Every repeat of every peer; gangs run one after the other, so that none disturbs another."""
    table = {(peer.name, fault): Measured(peer.name, fault) for peer in chosen for fault in faults}
    for peer in chosen:
        repeat = options.repeat_ours if peer.name == OURS else options.repeat_peers
        for turn in range(repeat):
            for fault, outcome in run_peer(peer, faults, options.limit_seconds, logs, turn):
                table[peer.name, fault].outcomes.append(outcome)
                shown = f"never: {outcome.error}"
                if outcome.seconds is not None:
                    shown = f"{outcome.seconds:.2f} s"
                print(f"[{turn + 1}/{repeat}] {peer.name} {fault}: {shown}", flush=True)
    return table


def ratios(table: Table) -> dict[str, float | None]:
    """`<peer>/<fault>/cold`: how many times faster ours is; None where the peer never recovered."""
    ours = {fault: cell.seconds() for (peer, fault), cell in table.items() if peer == OURS}
    return {
        f"{peer}/{fault}/{MODE}": ratio(cell.seconds(), ours.get(fault))
        for (peer, fault), cell in table.items()
        if peer != OURS
    }


def parse(arguments: Sequence[str] | None, known: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    theirs = [name for name in known if name != OURS]
    faults = [str(fault) for fault in Fault]
    parser.add_argument("--peers", nargs="*", choices=theirs, default=theirs)
    parser.add_argument("--faults", nargs="+", choices=faults, default=faults)
    parser.add_argument("--without-ours", action="store_true", help="measure the peers alone")
    parser.add_argument("--repeat-ours", type=int, default=3)
    parser.add_argument("--repeat-peers", type=int, default=1)
    parser.add_argument("--limit-seconds", type=float, default=120.0, help="then it is `never`")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (build/bench)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 where ours did not recover from some fault; a peer that did not is reported."""
    known = peers(OUR_ETCD_VERSION, PEERS_ETCD_VERSION)
    options = parse(arguments, list(known))
    names = [*([] if options.without_ours else [OURS]), *options.peers]
    faults = [fault for fault in Fault if str(fault) in options.faults]
    logs = options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    facts = machine_facts()
    table = measure([known[name] for name in names], faults, options, logs)
    rows = [cell.to_json() for cell in table.values()]
    content = {
        "benchmark": "recovery",
        "machine": facts,
        "limit_seconds": options.limit_seconds,
        "ratios": ratios(table),
        "results": rows,
    }
    (options.output / "recovery.json").write_text(json.dumps(content, indent=2) + "\n")
    plot_recovery(rows, options.limit_seconds, options.output / "recovery.png")
    print(f"written: {options.output / 'recovery.json'} and recovery.png")
    return int(any(cell.seconds() is None for (peer, _), cell in table.items() if peer == OURS))


if __name__ == "__main__":
    sys.exit(main())
