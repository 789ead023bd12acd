"""Prometheus server of the distribution, unpacked into the cache and not installed."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.environment import locked
from scripts.golang import SCRIPTS, output
from tests.cluster.places import CACHE
from tests.integration.etcd_server import Ports, wait_until

HOME = CACHE / "prometheus"
STOP_SECONDS = 20.0


def installed() -> Path:
    """Return the server's program; download and unpack it if it is not in the cache."""
    program = HOME / "prometheus"
    with locked(CACHE / "prometheus.lock"):
        if not program.exists():
            HOME.mkdir(exist_ok=True)
            with tempfile.TemporaryDirectory(dir=HOME) as scratch:
                output(SCRIPTS / "apt", "download", "prometheus", cwd=Path(scratch))
                (package,) = Path(scratch).glob("*.deb")
                output("dpkg-deb", "-x", package, scratch)
                fresh = Path(scratch, "usr", "bin", "prometheus")
                output(fresh, "--version")
                shutil.move(fresh, program)  # last: its presence means that it is complete
    return program


@dataclass(frozen=True, slots=True)
class Prometheus:
    """Running server."""

    port: int

    def ask(self, path: str, **query: str) -> Any:
        """Return the data of an answer of its HTTP API; fail with its error."""
        address = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(address, timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{query}: {error.read().decode()}") from error

    def values(self, query: str) -> list[float]:
        """Return the present values of an expression."""
        found = self.ask("query", query=query)["result"]
        return [float(one["value"][1]) for one in found]

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/-/ready", timeout=5):
                return True
        except OSError:
            return False


@contextmanager
def scraping(folder: Path, targets: Mapping[str, int], **labels: str) -> Iterator[Prometheus]:
    """Run a server that scrapes these ports of the loopback every two seconds.

    Args:
        folder: folder of its data and its log.
        targets: port by pod's name.
        labels: further labels of all targets.
    """
    ports = Ports(1)
    static = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {**labels, "pod": pod}}
        for pod, port in targets.items()
    ]
    jobs = [{"job_name": "test", "static_configs": static}]
    times = {"scrape_interval": "2s", "scrape_timeout": "2s"}
    settings = {"global": times, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
    command = ["setpriv", "--pdeathsig", "KILL", str(installed())]
    command += [f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{ports.numbers[0]}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        server = Prometheus(ports.numbers[0])
        wait_until(server.ready, f"Prometheus; see {folder / 'prometheus.log'}")
        yield server
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)
        ports.close()
