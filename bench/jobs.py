"""Cost of many jobs for operator and API server: `python -m bench.jobs`.

A real API server, operator and etcd. No kubelet runs: the benchmark sets the states of the pods and
writes the records of their agents. The numbers go to build/bench/jobs.json.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.machine import hardware
from bench.processes import processor_seconds, resident_mib
from bench.results import keep
from bench.settings import OUTPUT
from elasticjob_rendezvous.protocol.records.members import Cause, CauseKind
from tests.integration.apiserver import ApiServer
from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.operator.agent_records import Agents
from tests.integration.operator_rig import Namespace, Operator, alone_in

TRAINER = {
    "name": "trainer",
    "image": "trainer:1",
    "command": ["python3", "train.py"],
    "env": [{"name": f"VARIABLE_{number}", "value": "1"} for number in range(20)],
}


@dataclass(frozen=True, slots=True)
class Phase:
    """Cost of one phase for all jobs. Unit: seconds, of processor time except for the duration."""

    name: str
    seconds: float
    operator: float
    api_server: float


@dataclass(frozen=True, slots=True)
class System:
    """Servers under test, and a namespace with `count` jobs of `nodes` nodes."""

    api: ApiServer
    etcd: EtcdServer
    operator: Operator
    namespace: Namespace
    count: int
    nodes: int

    def jobs(self) -> list[str]:
        return [f"job-{number}" for number in range(self.count)]

    def pods(self, job: str) -> list[str]:
        return [f"{job}-{number}" for number in range(self.nodes)]

    def measure(self, name: str, act: Callable[[], object]) -> Phase:
        began, before = time.monotonic(), self._used()
        act()
        spent = [now - then for now, then in zip(self._used(), before, strict=True)]
        phase = Phase(name, time.monotonic() - began, *spent)
        each = [1000 * seconds / self.count for seconds in spent]
        line = "operator {:.0f} ms, API server {:.0f} ms".format(*each)
        print(f"{name}: {phase.seconds:.1f} s; processor time for each job: {line}", flush=True)
        return phase

    def _used(self) -> tuple[float, float]:
        """Return the processor time of operator and API server."""
        pids = pid_of(self.operator.process), pid_of(self.api.process)
        return processor_seconds(pids[0]), processor_seconds(pids[1])

    # --- phases

    def create(self) -> None:
        for job in self.jobs():
            template = {"spec": {"containers": [TRAINER]}}
            self.namespace.create_job(job, minNodes=1, maxNodes=self.nodes, template=template)
        wanted = self.count * self.nodes
        wait_until(lambda: len(self.namespace.pods()) == wanted, "all pods", 5.0 * self.count)

    def run(self) -> None:
        for job in self.jobs():
            for pod in self.pods(job):
                self.namespace.run_pod(pod)

    def train(self, number: int, cause: Cause) -> None:
        """Seal a round of each job, and wait until the status of each has it."""
        for job in self.jobs():
            agents = Agents(self.etcd, self.namespace, job)
            agents.join(*self.pods(job))
            agents.seal(number, cause)

        def shown() -> bool:
            found = self.namespace.all("elasticjobs")
            rounds = [(job.get("status") or {}).get("rendezvous", {}).get("round") for job in found]
            return rounds == [number] * self.count

        wait_until(shown, f"round {number} of all jobs", 5.0 * self.count)


def pid_of(process: subprocess.Popen[bytes] | None) -> int:
    assert process is not None, "the server was not started"
    return process.pid


@contextlib.contextmanager
def started(folder: Path, count: int, nodes: int) -> Iterator[System]:
    """Run the servers for the duration of the block."""
    for name in ("api", "etcd", "operator"):
        (folder / name).mkdir()
    with contextlib.ExitStack() as stack:
        api = ApiServer(folder / "api", collection={})  # measured with the usual setting
        stack.callback(api.close)
        api.start()
        etcd = EtcdServer(folder / "etcd")
        stack.callback(etcd.close)
        etcd.start()
        namespace = api.namespace("many")
        operator = Operator(folder / "operator", api, etcd, options=alone_in(namespace))
        stack.enter_context(operator.running())
        yield System(api, etcd, operator, Namespace(api, namespace), count, nodes)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.jobs", description=__doc__)
    parser.add_argument("--jobs", type=int, default=100, metavar="N", help="number of jobs (100)")
    parser.add_argument("--nodes", type=int, default=3, metavar="N", help="nodes of each job (3)")
    parser.add_argument("--idle-seconds", type=float, default=60.0, help="measured without changes")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder (build/bench)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        started(Path(folder), options.jobs, options.nodes) as system,
    ):
        phases = [
            system.measure("create pods", system.create),
            system.measure("pods run", system.run),
            system.measure("first round", lambda: system.train(1, Cause(CauseKind.START))),
            system.measure("next round", lambda: system.train(2, Cause(CauseKind.FAILURE))),
        ]
        time.sleep(options.idle_seconds / 6)  # the last events and metrics
        idle = system.measure("no change", lambda: time.sleep(options.idle_seconds))
        memory = resident_mib(pid_of(system.operator.process))
    share = 100 * idle.operator / idle.seconds, 100 * idle.api_server / idle.seconds
    line = "operator {:.1f} %, API server {:.1f} % of a processor".format(*share)
    print(f"without changes: {line}; memory of the operator: {memory:.0f} MiB", flush=True)
    content = {
        "benchmark": "jobs",
        "machine": hardware(),
        "jobs": options.jobs,
        "nodes": options.nodes,
        "phases": [asdict(phase) for phase in (*phases, idle)],
        "operator_memory_mib": memory,
    }
    keep(options.output / "jobs.json", content)
    print(f"written: {options.output / 'jobs.json'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
