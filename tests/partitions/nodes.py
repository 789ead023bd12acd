"""Hosts of a run: etcd, and nodes whose agents run as in a pod or as `elasticjob agent`."""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from elasticjob_rendezvous.protocol.records.codec import decode, encode
from elasticjob_rendezvous.protocol.records.keys import Keys, job_prefix
from elasticjob_rendezvous.protocol.records.members import Round
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.records.roster import Roster
from tests.integration.etcd_server import binary
from tests.partitions.network import Network
from tests.partitions.plan import Mode, Plan
from tests.paths import ROOT

_PYTHONPATH = ":".join(
    str(ROOT / part) for part in ("operator", "sdk", "rendezvous", "sidecar", "cli")
)
_WORKER = str(Path(__file__).with_name("worker.py"))
_STOP_GRACE_SECONDS = 2.0
_CTL_SECONDS = 10.0
_RUN = "partition"
ETCD = "etcd"


class Process:
    """Process on a host, with its output in a file, in a session of its own: no Ctrl-C."""

    def __init__(
        self, network: Network, host: str, log: Path, *command: str, env: dict[str, str]
    ) -> None:
        self.log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                network.command(host, *command),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code; None while the process runs."""
        return self._process.poll()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def reap(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()


class EtcdHost:
    """Real etcd on a host of its own, and access to the job's keys."""

    def __init__(self, network: Network, folder: Path, version: str) -> None:
        self._network = network
        self._version = version
        self.keys = Keys(job_prefix("default", _RUN, 0))
        self.endpoint = f"{network.address(ETCD)}:2379"
        url = f"http://{self.endpoint}"
        options = {
            "data-dir": str(folder / "etcd-data"),
            "listen-client-urls": f"{url},http://127.0.0.1:2379",
            "advertise-client-urls": url,
            "listen-peer-urls": "http://127.0.0.1:2380",
            "logger": "zap",
            "log-level": "warn",
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        if version != "3.4":
            flags.append("--unsafe-no-fsync")
        env = {name: value for name, value in os.environ.items() if not name.startswith("ETCD")}
        self.process = Process(
            network, ETCD, folder / "etcd.log", str(binary(version)), *flags, env=env
        )

    def _ctl(self, *arguments: str) -> str:
        program = str(binary(self._version, "etcdctl"))
        command = self._network.command(ETCD, program, "--endpoints=127.0.0.1:2379", *arguments)
        env = {name: value for name, value in os.environ.items() if not name.startswith("ETCDCTL")}
        done = subprocess.run(
            command,
            env=env | {"ETCDCTL_API": "3"},
            capture_output=True,
            text=True,
            timeout=_CTL_SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"etcdctl {arguments}: {done.stderr.strip()}")
        return done.stdout

    def serves(self) -> bool:
        if self.process.code is not None:
            raise RuntimeError(f"etcd ended: {self.process.log.read_text()[-2000:]}")
        with suppress(RuntimeError, subprocess.TimeoutExpired):
            return bool(self._ctl("endpoint", "status"))
        return False

    def put_bounds(self, bounds: RendezvousParams) -> None:
        self._ctl("put", self.keys.bounds, encode(bounds).decode())

    def dump(self) -> dict[str, bytes]:
        """Return all keys of the job."""
        found = json.loads(self._ctl("get", "--prefix", self.keys.prefix, "-w", "json"))
        pairs = ((pair["key"], pair.get("value", "")) for pair in found.get("kvs", []))
        return {base64.b64decode(key).decode(): base64.b64decode(value) for key, value in pairs}

    def round(self) -> Round:
        value = self.dump()[self.keys.round]
        return decode(Round, self.keys.round, value)

    def names(self) -> dict[str, str]:
        """Return the names of the newest roster's members, by id."""
        value = self.dump()[self.keys.seats]
        return {
            assignment.id: assignment.name
            for assignment in decode(Roster, self.keys.seats, value).seats
        }


class Node:
    """Node of a run: its agent and, in a pod, the launcher beside it."""

    def __init__(
        self, network: Network, name: str, plan: Plan, etcd: EtcdHost, folder: Path, launcher: Path
    ) -> None:
        self.name = name
        self._network = network
        self._plan = plan
        self._etcd = etcd
        self._folder = folder
        self._launcher_file = launcher
        self._sockets = Path(tempfile.mkdtemp(prefix="ejp-"))  # short: socket paths are limited
        self.launcher: Process | None = None
        self.agents: list[Process] = []
        worker = [_WORKER, str(folder / "journal")]
        self._worker = [*worker, "stubborn"] if plan.stubborn else worker
        if plan.mode is Mode.POD:
            self.launcher = self._run(
                "launcher", str(launcher), "--", sys.executable, *self._worker, env=self._pod()
            )
        self.start_agent()

    @property
    def agent(self) -> Process:
        return self.agents[-1]

    @property
    def processes(self) -> list[Process]:
        return [*self.agents, *([self.launcher] if self.launcher else [])]

    def start_agent(self) -> None:
        if self._plan.mode is Mode.POD:
            agent = self._run("agent", "-m", "elasticjob_agent", env=self._pod())
        else:
            agent = self._run("agent", *self._bare(), *self._worker, env=self._env())
        self.agents.append(agent)

    def left(self) -> list[int]:
        """Return the processes of this node."""
        return self._network.processes(self.name)

    def close(self) -> None:
        for process in self.processes:
            process.reap()
        shutil.rmtree(self._sockets)

    def _run(self, what: str, *arguments: str, env: dict[str, str]) -> Process:
        log = self._folder / f"{self.name}-{what}-{len(self.agents)}.log"
        return Process(self._network, self.name, log, sys.executable, *arguments, env=env)

    def _env(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": _PYTHONPATH, "PARTITION_NODE": self.name}

    def _pod(self) -> dict[str, str]:
        key = self._sockets / "job-key"
        key.write_bytes(b"a secret of this run")
        return {
            **self._env(),
            "ELASTICJOB_PREFIX": self._etcd.keys.prefix,
            "ELASTICJOB_MEMBER_ID": f"uid-{self.name}",
            "ELASTICJOB_NAME": self.name,
            "ELASTICJOB_ADDRESS": self._network.address(self.name),
            "ELASTICJOB_ENDPOINTS": self._etcd.endpoint,
            "ELASTICJOB_JOB_KEY_FILE": str(key),
            "ELASTICJOB_SOCKET": str(self._sockets / "launcher.sock"),
            "ELASTICJOB_CONTROL": str(self._sockets / "control.sock"),
            "ELASTICJOB_STOP_GRACE_SECONDS": f"{_STOP_GRACE_SECONDS:g}",
            "ELASTICJOB_KEEP_ALIVE_SECONDS": f"{self._plan.lease_seconds:g}",
            "ELASTICJOB_TERMINATION_LOG": str(self._sockets / "termination-log"),
            "ELASTICJOB_WARM_START": "Auto" if self._plan.warm else "Never",
        }

    def _bare(self) -> list[str]:
        plan = self._plan
        conf = {
            "last_call_timeout": 15,
            "settle": 0.3,
            "keep_alive_seconds": f"{plan.lease_seconds:g}",
            "stop_grace": _STOP_GRACE_SECONDS,
        }
        return [
            *("-m", "elasticjob_cli", "agent"),
            f"--nnodes=1:{plan.nodes}",
            "--nproc-per-node=1",
            f"--rdzv-endpoint={self._etcd.endpoint}",
            f"--rdzv-id={_RUN}",
            f"--rdzv-conf={','.join(f'{key}={value}' for key, value in conf.items())}",
            f"--name={self.name}",
            f"--warm-start={'auto' if plan.warm else 'never'}",
        ]


def bounds(plan: Plan) -> RendezvousParams:
    """Return the bounds that an operator writes for the pods of a run."""
    return RendezvousParams(
        1,
        plan.nodes,
        expected=plan.nodes,
        last_call_seconds=15.0,
        keep_alive_seconds=plan.lease_seconds,
        settle_seconds=0.3,
        stop_grace_seconds=_STOP_GRACE_SECONDS,
    )
