"""Systems of the comparison, each with the settings that its documentation recommends."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.etcd_proc import free_port
from bench.peers.commands import OWN_STORE
from bench.processes import die_with_parent
from bench.settings import (
    OUR_ETCD_VERSION,
    PEERS_ETCD_VERSION,
    REPOSITORY,
    ProgramMissing,
    child_environment,
)
from elasticjob_agent.zipapp_build import install
from elasticjob_launcher.settings import library_beside

SCRIPT = REPOSITORY / "bench" / "peers" / "trainee.py"
UNDISTURBED = "torchrun-c10d"
"""System of the undisturbed run that all are compared with."""
MAX_RESTARTS = 1000  # high enough that no budget ends the gang
_TORCHRUN = ("-m", "torch.distributed.run")
LIGHTHOUSE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class System:
    """Launcher of one agent on each node, and the way in which the script saves its state.

    Args:
        saves: option of the training script.
        needs: name of the environment with its packages, of `tests/corpus/environments`.
    """

    name: str
    launcher: Sequence[str]
    backend: str
    saves: str
    etcd_version: str | None = None
    etcd_v2: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[str] = ()
    needs: str | None = None
    interpreter: Path = Path(sys.executable)
    nodes: int = 2
    script_options: Sequence[str] = ()

    @property
    def ours(self) -> bool:
        return self.backend == "etcd" and "elasticjob_cli" in self.launcher

    def with_script(self, options: Sequence[str], nodes: int) -> System:
        """Return this system with options of the training script, for at most so many nodes."""
        return dataclasses.replace(self, script_options=options, nodes=nodes)

    def command(self, endpoint: str, run_id: str, member: int) -> list[str]:
        """Return the command line of one node's agent."""
        conf = f"is_host={str(member == 0).lower()}" if self.backend == "c10d" else ""
        rendezvous = [
            f"--nnodes=1:{self.nodes}",
            f"--rdzv-backend={self.backend}",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-id={run_id}",
            "--local-addr=127.0.0.1",
            *([f"--rdzv-conf={conf}"] if conf else []),
        ]
        if self.saves == "torchft":  # a replica group for each node, which torchrun restarts
            rendezvous = ["--standalone", "--nnodes=1"]
        return [
            str(self.interpreter),
            *self.launcher,
            *rendezvous,
            "--nproc-per-node=1",
            f"--max-restarts={MAX_RESTARTS}",
            *self.options,
            str(SCRIPT),
            f"--saves={self.saves}",
            *self.script_options,
        ]


_OURS = ("-m", "elasticjob_cli", "agent")
SYSTEMS: Sequence[System] = (
    System("elasticjob-snapshots", _OURS, "etcd", "snapshots", OUR_ETCD_VERSION),
    System("elasticjob-storage", _OURS, "etcd", "storage", OUR_ETCD_VERSION),
    System("torchrun-c10d", _TORCHRUN, "c10d", "storage", environment=OWN_STORE),
    System("torchrun-etcd", _TORCHRUN, "etcd", "storage", PEERS_ETCD_VERSION, etcd_v2=True),
    System("torchft", _TORCHRUN, "c10d", "torchft", needs="peers"),
    System(
        "nvrx",
        ("-m", "nvidia_resiliency_ext.fault_tolerance.launcher"),
        "c10d",
        "storage",
        environment=OWN_STORE,
        options=("--ignore-missing-fault-tol-cfg",),
        needs="peers",
    ),
)


@contextlib.contextmanager
def prepared(system: System, interpreter: Path | None, log: Path) -> Iterator[System]:
    """Yield the system with its interpreter, and with a running lighthouse if it needs one."""
    made = dataclasses.replace(system, interpreter=interpreter or system.interpreter)
    with contextlib.ExitStack() as stack:
        path = f"{child_environment()['PYTHONPATH']}:{REPOSITORY}"
        if system.ours:  # the library as in a pod, where it is an installed package
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="elasticjob-bench-"))
            install(Path(folder) / "launcher.pyz")
            path = f"{library_beside(f'{folder}/launcher.pyz')}:{path}"
        environment = {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **system.environment}
        if system.saves == "torchft":
            lighthouse = stack.enter_context(_lighthouse(made.interpreter.parent, log))
            environment["TORCHFT_LIGHTHOUSE"] = lighthouse
        yield dataclasses.replace(made, environment=environment)


@contextlib.contextmanager
def _lighthouse(programs: Path, log: Path) -> Iterator[str]:
    """Run torchft's lighthouse on loopback with the settings of its documentation."""
    port = free_port()
    searched = f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if (program := shutil.which("torchft_lighthouse", path=searched)) is None:
        raise ProgramMissing(
            f"no torchft_lighthouse in {programs} and none on PATH: install torchft"
        )
    command = [program, "--min_replicas=1", f"--bind=[::]:{port}"]
    command += ["--quorum_tick_ms=100", "--join_timeout_ms=10000"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
        )
    try:
        time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(timeout=LIGHTHOUSE_SECONDS)
