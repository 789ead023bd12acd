"""Real etcd servers for tests: any of the four versions, alone or as a cluster.

A server is started under `setpriv --pdeathsig`, so that it dies with the test process in every
case, and is signalled by its pid alone. Its ports are held by bound, not listening sockets for the
life of the object: no other process gets them, and the server binds over them again after a
restart.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.etcd_proc import FIRST_PORT, LAST_PORT
from tests.integration.certificates import Certificates

VERSIONS = ("3.4", "3.5", "3.6", "3.7")
NEWEST = VERSIONS[-1]

_START_SECONDS = 60.0
_STOP_SECONDS = 60.0
_HTTP_SECONDS = 2.0


def binary(version: str, name: str = "etcd") -> Path:
    """Return a program of etcd of that minor version; fail with the remedy if there is none."""
    cache = Path.home() / ".cache" / "elasticjob"
    root = Path(os.environ.get("ELASTICJOB_ETCD_DIR", cache))
    candidates = sorted(root.glob(f"etcd-{version}*/{name}"), reverse=True)
    if version == "3.4":
        candidates.append(Path("/usr/bin") / name)  # Debian's package
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    raise FileNotFoundError(f"no {name} {version} in {root}: run `make etcd` to install it")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = _START_SECONDS) -> None:
    """Poll until `condition` holds; raise TimeoutError naming `what`."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() > began + seconds:
            raise TimeoutError(f"waited {seconds:g} s in vain for {what}")
        pause(began)


def pause(began: float) -> None:
    """Sleep between two evaluations of an awaited condition: an eighth of the wait so far.

    An evaluation may be a request to a server or a process. Without a pause that grows, such waits
    use a third of a processor.
    """
    time.sleep(min(0.1, max(0.02, (time.monotonic() - began) / 8)))


def stop(pid: int) -> None:
    """Send SIGSTOP and wait until no thread of the process runs any more."""
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    wait_until(lambda: all(map(_is_stopped, threads.iterdir())), f"process {pid} to stop")


def _is_stopped(thread: Path) -> bool:
    """Return True if the thread in this folder of /proc is stopped or has ended."""
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] in "TtXZ"
    except (FileNotFoundError, ProcessLookupError):
        return True


class Ports:
    """Reserved ports on all addresses, held until `close`; a server may bind to them meanwhile."""

    def __init__(self, count: int) -> None:
        self._sockets: list[socket.socket] = []
        while len(self._sockets) < count:
            held = socket.socket()
            try:
                held.bind(("", random.randint(FIRST_PORT, LAST_PORT)))
            except OSError:  # another process has it, or has reserved it
                held.close()
                continue
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sockets.append(held)
        self.numbers: list[int] = [held.getsockname()[1] for held in self._sockets]

    def close(self) -> None:
        for held in self._sockets:
            held.close()


@dataclass
class EtcdServer:
    """Single etcd server. `client_certificates` requires client certificates (mTLS)."""

    folder: Path
    version: str = NEWEST
    name: str = "n0"
    certificates: Certificates | None = None
    client_certificates: bool = False
    arguments: Sequence[str] = ()
    ports: Ports = field(default_factory=lambda: Ports(2))
    peers: str = ""
    syncs: bool = False  # True: it waits for the disk, as outside of tests, and measures that
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        scheme = "https" if self.certificates else "http"
        return f"{scheme}://127.0.0.1:{self.ports.numbers[0]}"

    @property
    def port(self) -> int:
        return self.ports.numbers[0]

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self.ports.numbers[1]}"

    @property
    def pid(self) -> int:
        assert self.process is not None, "the server was not started"
        return self.process.pid

    def command(self) -> list[str]:
        options = {
            "name": self.name,
            "data-dir": str(self.folder / "data"),
            "listen-client-urls": self.url,
            "advertise-client-urls": self.url,
            "listen-peer-urls": self.peer_url,
            "initial-advertise-peer-urls": self.peer_url,
            "initial-cluster": self.peers or f"{self.name}={self.peer_url}",
            "heartbeat-interval": "50",
            "election-timeout": "500",
            "logger": "zap",
            "log-level": "warn",
        }
        if self.certificates:
            options["cert-file"] = str(self.certificates.server.cert_file)
            options["key-file"] = str(self.certificates.server.key_file)
            if self.client_certificates:
                options["trusted-ca-file"] = str(self.certificates.ca_file)
                options["client-cert-auth"] = "true"
        flags = [f"--{name}={value}" for name, value in options.items()]
        if self.version != "3.4" and not self.syncs:
            flags.append("--unsafe-no-fsync")
        pdeathsig = ["setpriv", "--pdeathsig", "KILL"]
        return [*pdeathsig, str(binary(self.version)), *flags, *self.arguments]

    def launch(self) -> None:
        """Start the process, without waiting for it to serve."""
        self.folder.mkdir(parents=True, exist_ok=True)
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )

    def start(self) -> EtcdServer:
        self.launch()
        self.wait_healthy()
        return self

    def wait_healthy(self) -> None:
        try:
            wait_until(self.healthy, f"etcd {self.version} at {self.url}")
        except (TimeoutError, ChildProcessError) as error:
            tail = self.log.read_text(errors="replace")[-2000:]
            raise AssertionError(f"{error}; its log ends with:\n{tail}") from error

    @property
    def log(self) -> Path:
        return self.folder / "etcd.log"

    def healthy(self) -> bool:
        """Return True if the server answers a linearizable read, according to its /health."""
        if self.process is not None and self.process.poll() is not None:
            raise ChildProcessError(f"etcd ended with {self.process.returncode}")
        try:
            return b'"true"' in self._get("/health")
        except (urllib.error.URLError, OSError):
            return False

    def metric(self, name: str) -> float:
        """Return the value of a metric without labels."""
        lines = self._get("/metrics").decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))

    def _get(self, path: str) -> bytes:
        tls: ssl.SSLContext | None = None
        if self.certificates:
            tls = ssl.create_default_context(cafile=self.certificates.ca_file)
            tls.load_cert_chain(
                self.certificates.client.cert_file, self.certificates.client.key_file
            )
        with urllib.request.urlopen(
            f"{self.url}{path}", timeout=_HTTP_SECONDS, context=tls
        ) as reply:
            body: bytes = reply.read()
        return body

    def ctl(self, *arguments: str, user: str | None = None) -> str:
        """Run etcdctl against this server and return its output."""
        command = [str(binary(self.version, "etcdctl")), f"--endpoints={self.url}"]
        if self.certificates:
            command += [
                f"--cacert={self.certificates.ca_file}",
                f"--cert={self.certificates.client.cert_file}",
                f"--key={self.certificates.client.key_file}",
            ]
        if user:
            command.append(f"--user={user}")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCDCTL_")}
        environment["ETCDCTL_API"] = "3"
        done = subprocess.run(
            [*command, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_START_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"
        return done.stdout

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def pause(self) -> None:
        stop(self.pid)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(_STOP_SECONDS)

    def wipe(self) -> None:
        """Delete all data of a stopped server."""
        shutil.rmtree(self.folder / "data")

    def restart(self) -> None:
        """Kill the server and start it again on the same data and ports."""
        self.kill()
        self.start()

    def close(self) -> None:
        """End the process, in any state, and release its ports."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self.ports.close()


@dataclass
class EtcdCluster:
    """Cluster of etcd members."""

    folder: Path
    version: str = NEWEST
    size: int = 3
    members: list[EtcdServer] = field(default_factory=list)

    def start(self) -> EtcdCluster:
        self.members = [
            EtcdServer(self.folder / f"n{index}", self.version, f"n{index}")
            for index in range(self.size)
        ]
        peers = ",".join(f"{member.name}={member.peer_url}" for member in self.members)
        for member in self.members:
            member.peers = peers
            member.launch()
        for member in self.members:
            member.wait_healthy()
        return self

    @property
    def urls(self) -> list[str]:
        return [member.url for member in self.members]

    def close(self) -> None:
        for member in self.members:
            member.close()
