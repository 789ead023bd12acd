"""Temporary etcd server on free loopback ports, with a count of its requests."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.processes import die_with_parent

START_SECONDS = 20.0
HTTP_SECONDS = 5.0
ATTEMPTS = 3  # another process may take a free port before etcd binds it
FIRST_PORT, LAST_PORT = 12_000, 29_999
"""Ports below those that the kernel chooses, for outgoing connections and for port 0."""

# Every message sent by a client: a unary call is one, and so is each keep-alive or watch request
# on a stream (grpc_server_handled_total counts a stream once, and only after its end).
_SAMPLE = re.compile(
    r"^(?:grpc_server_msg_received_total|etcd_http_received_total)"
    r"\{.*?method=\"(?P<method>\w+)\".*\} (?P<value>[0-9.e+]+)$",
    re.MULTILINE,
)


class EtcdFailed(Exception):
    """Server that did not start; the text has the end of its log."""


def count_requests(metrics: str) -> Counter[str]:
    """Count client requests of both APIs by method from the text of `/metrics`."""
    counts: Counter[str] = Counter()
    for sample in _SAMPLE.finditer(metrics):
        counts[sample["method"]] += int(float(sample["value"]))
    return counts


@dataclass(frozen=True, slots=True)
class EtcdServer:
    endpoint: str  # host:port
    pid: int

    def requests(self) -> Counter[str]:
        """Return the client requests by method since the start."""
        return count_requests(_read(f"http://{self.endpoint}/metrics"))


@contextlib.contextmanager
def etcd_server(binary: Path, *, v2: bool) -> Iterator[EtcdServer]:
    """Run an etcd until the end of the block, with etcd's default durability."""
    with tempfile.TemporaryDirectory(prefix="elasticjob-bench-etcd-") as folder:
        process, endpoint = _started(binary, Path(folder), v2=v2)
        try:
            yield EtcdServer(endpoint, process.pid)
        finally:
            process.kill()
            process.wait(timeout=START_SECONDS)


def version(binary: Path) -> str:
    """Return the version the binary prints, such as `3.7.3`."""
    text = subprocess.run(
        [binary, "--version"], capture_output=True, text=True, timeout=HTTP_SECONDS, check=True
    ).stdout
    return text.splitlines()[0].rpartition(" ")[2]


def free_port() -> int:
    """Return a free port that the kernel gives to no other process before a server binds to it."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.randint(FIRST_PORT, LAST_PORT)))
            return int(probe.getsockname()[1])


def _started(binary: Path, folder: Path, *, v2: bool) -> tuple[subprocess.Popen[bytes], str]:
    for attempt in range(ATTEMPTS):
        client, peer = free_port(), free_port()
        endpoint, log = f"127.0.0.1:{client}", folder / f"log-{attempt}"
        command = [str(binary), "--name=bench", f"--data-dir={folder / f'data-{attempt}'}"]
        command += [f"--listen-client-urls=http://{endpoint}"]
        command += [f"--advertise-client-urls=http://{endpoint}"]
        command += [f"--listen-peer-urls=http://127.0.0.1:{peer}"]
        command += [f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}"]
        command += [f"--initial-cluster=bench=http://127.0.0.1:{peer}"]
        command += ["--enable-v2"] if v2 else []
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, preexec_fn=die_with_parent
            )
        if _healthy(process, endpoint):
            return process, endpoint
        process.kill()
        process.wait(timeout=START_SECONDS)
    tail = log.read_text(errors="replace")[-1000:]
    raise EtcdFailed(f"{binary} did not start in {ATTEMPTS} attempts; the end of its log:\n{tail}")


def _healthy(process: subprocess.Popen[bytes], endpoint: str) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if '"true"' in _read(f"http://{endpoint}/health"):
                return True
        time.sleep(0.02)
    return False


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=HTTP_SECONDS) as response:
        content: bytes = response.read()
    return content.decode()
