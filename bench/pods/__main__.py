"""Recovery time of a gang of pods on a real cluster: `python -m bench.pods`.

Installs ElasticJob on the cluster of `make cluster` with this checkout's images and chart, and
repeatedly injects faults into a gang of four small pods: a worker killed, a pod deleted as by a
drain, agent and trainer of a pod killed, a node joined. A recovery lasts from the fault until every
worker has completed its first all-reduce, by the workers' own clocks; its parts come from the job's
status. The time Kubernetes takes for a new pod is listed separately, beside its time for a plain
pod. Numbers go to build/bench/pods.json. Ten runs take about a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from bench.machine import hardware
from bench.pods.api import Lives
from bench.pods.gang import NAMESPACE, Gang, manifests
from bench.pods.hands import Hands
from bench.pods.runs import Fault, Runs
from bench.results import keep
from bench.settings import OUTPUT
from tests.cluster import images, lifecycle
from tests.cluster.cluster import Cluster
from tests.e2e.console import Console, opened
from tests.e2e.installation import Installation


@contextmanager
def installed(cluster: Cluster) -> Iterator[Console]:
    """Install ElasticJob and create a namespace; remove earlier ones first and both at the end."""
    images.build(lifecycle.builder_engine(cluster))
    images.load(cluster)
    with opened(cluster, cluster.environment()) as console:
        installation = Installation(console)
        if installation.installed:
            installation.uninstall()
        gone = ("delete", "namespace", NAMESPACE, "--ignore-not-found")
        console.kubectl(*gone, seconds=180)
        installation.install()
        try:
            console.kubectl("create", "namespace", NAMESPACE)
            yield console
        finally:
            console.kubectl(*gone, seconds=180)
            installation.uninstall()


def measure(cluster: Cluster, console: Console, options: argparse.Namespace) -> Runs:
    """Run every fault as often as requested."""
    runs = Runs(options.gang)
    bundle = {"apiVersion": "v1", "kind": "List", "items": manifests(options.gang, options.warm)}
    lives = Lives(console.api, NAMESPACE)
    lives.begin()
    gang, hands = Gang(console.api, lives), Hands(console.api, cluster)
    console.kubectl("-n", NAMESPACE, "apply", "-f", "-", given=json.dumps(bundle))
    # An interruption keeps the results so far.
    with suppress(KeyboardInterrupt):
        for turn in range(options.repeat):
            for fault in [fault for fault in Fault if str(fault) in options.faults]:
                runs.run(gang, hands, fault, turn)
    return runs


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.pods",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    faults = [str(fault) for fault in Fault]
    parser.add_argument("--faults", nargs="+", choices=faults, default=faults)
    parser.add_argument("--gang", type=int, default=4, metavar="N", help="pods (4)")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--cold", dest="warm", action="store_false", help="without warm start")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (build/bench)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 if the gang did not recover from a fault, 2 without a cluster."""
    options = parse(arguments)
    cluster = lifecycle.found(patience_seconds=10)
    if cluster is None:
        print("no cluster is running: start one with `make cluster`")
        return 2
    options.output.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # even if a shell has ignored it
        signal.signal(number, signal.default_int_handler)
    facts = hardware()
    with installed(cluster) as console:
        runs = measure(cluster, console, options)
    name = "pods.json" if options.warm else "pods-cold.json"
    content = {
        "benchmark": "pods",
        "machine": facts,
        "nodes": len(cluster.nodes),
        "gang": options.gang,
        "mode": "warm" if options.warm else "cold",
        "results": runs.to_json(),
    }
    keep(options.output / name, content)
    print(runs.table())
    print(f"written: {options.output / name}")
    return int(bool(runs.errors()))


if __name__ == "__main__":
    sys.exit(main())
