"""Members of the chart's etcd on loopback, with the commands of its StatefulSet."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from elasticjob_operator.etcd_tls.certificate_rotation import Wanted, due_changes
from elasticjob_operator.etcd_tls.certificates import (
    AGENTS_CERT,
    AGENTS_KEY,
    BUNDLE,
    CERT,
    KEY,
    OPERATOR_CERT,
    OPERATOR_KEY,
    Data,
    apply_changes,
    parse_data,
)
from elasticjob_rendezvous.etcd.client import Client, Tls
from tests.integration.etcd_server import Ports, binary, wait_until
from tests.integration.helm_chart import NAMESPACE, Json, Rendered, pod_template, render

NAME = "elasticjob-etcd"
MOUNTED = (BUNDLE, CERT, KEY, OPERATOR_CERT, OPERATOR_KEY, AGENTS_CERT, AGENTS_KEY)
SECONDS = 60.0
STOP_SECONDS = 60.0


def image_version(rendered: Rendered) -> str:
    image = pod_template(rendered.find("StatefulSet", NAME))["spec"]["containers"][0]["image"]
    found: str = image.rpartition(":v")[2]
    return found


@dataclass
class Member:
    """Pod of the StatefulSet, on loopback."""

    rendered: Rendered
    folder: Path
    ordinal: int
    others: list[Member]
    ports: Ports = field(default_factory=lambda: Ports(3))
    process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        """Return the container's command, with addresses and folders of this machine."""
        return self._command(self._pod["containers"][0])

    def init_commands(self) -> list[list[str]]:
        """Return the commands of the init containers, likewise."""
        return [self._command(one) for one in self._pod.get("initContainers", ())]

    @property
    def data(self) -> Path:
        """Folder of etcd's data."""
        return self.folder / f"member-{self.ordinal}" / "data"

    @property
    def _pod(self) -> Json:
        found: Json = pod_template(self.rendered.find("StatefulSet", NAME))["spec"]
        return found

    def _command(self, container: Json) -> list[str]:
        words: list[str] = [*container["command"], *container.get("args", ())]
        program = words.pop(0)
        version = image_version(self.rendered).rpartition(".")[0]
        found = sys.executable if program == "python" else str(binary(version, program))
        return [found, *map(self._here, words)]

    def _here(self, word: str) -> str:
        word = word.replace("$(POD_NAME)", f"{NAME}-{self.ordinal}")
        for member in (*self.others, self):
            host = rf"{NAME}-{member.ordinal}\.{NAME}-members\.[a-z-]+\.svc"
            for container_port, port in zip((2379, 2380), member.ports.numbers, strict=False):
                word = re.sub(f"{host}:{container_port}", f"127.0.0.1:{port}", word)
        for container_port, port in zip((2379, 2380, 2381), self.ports.numbers, strict=True):
            word = word.replace(f"0.0.0.0:{container_port}", f"127.0.0.1:{port}")
        word = word.replace("/var/lib/etcd", str(self.folder / f"member-{self.ordinal}"))
        word = word.replace("/initial", str(self.folder / f"initial-{self.ordinal}"))
        return word.replace("/etc/etcd/tls", str(self.folder / "tls"))

    @property
    def endpoint(self) -> str:
        return f"https://127.0.0.1:{self.ports.numbers[0]}"

    def prepare(self) -> str:
        """Run the init containers; return their output."""
        for folder in (f"initial-{self.ordinal}", f"member-{self.ordinal}"):
            (self.folder / folder).mkdir(exist_ok=True)
        lines = []
        for command in self.init_commands():
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            assert done.returncode == 0, done.stderr
            lines.append(done.stdout)
        return "".join(lines)

    def start(self) -> None:
        self.prepare()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        with (self.folder / f"member-{self.ordinal}.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *self.command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def page(self, path: str) -> tuple[int, str]:
        """Return a page of its port for probes and metrics, which requires no certificate."""
        try:
            url = f"http://127.0.0.1:{self.ports.numbers[2]}{path}"
            with urllib.request.urlopen(url, timeout=5) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def probe(self, kind: str) -> str:
        """Return the path of the container's probe of this kind."""
        container = pod_template(self.rendered.find("StatefulSet", NAME))["spec"]["containers"][0]
        found: str = container[kind]["httpGet"]["path"]
        return found

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            return self.page(self.probe("readinessProbe"))[0] == 200

        try:
            wait_until(ready, f"member {self.ordinal}", SECONDS)
        except TimeoutError as error:
            raise AssertionError(f"{error}:\n{self.log()}") from error

    def log(self) -> str:
        return (self.folder / f"member-{self.ordinal}.log").read_text()[-3000:]

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(STOP_SECONDS)


def secret() -> Data:
    """Return the content of the Secret made by the chart's hook."""
    members = f"*.{NAME}-members.{NAMESPACE}.svc"
    return signed({}, members, "localhost", "127.0.0.1")


def signed(data: Data, *names: str) -> Data:
    """Return the data with a certificate for these names; its authority stays."""
    wanted, now = Wanted(frozenset(names)), datetime.now(UTC)
    return apply_changes(data, due_changes(parse_data(data), wanted, now), wanted, now)


@contextmanager
def started(values: Json, folder: Path) -> Iterator[tuple[list[Member], Data]]:
    """Yield the members that these values request, started together, and the Secret's content."""
    rendered, data = render(values), secret()
    (folder / "tls").mkdir()
    for item in MOUNTED:
        (folder / "tls" / item).write_bytes(data[item])
    members: list[Member] = []
    replicas = rendered.find("StatefulSet", NAME)["spec"]["replicas"]
    members += [Member(rendered, folder, ordinal, members) for ordinal in range(replicas)]
    try:
        for member in members:
            member.start()
        for member in members:
            member.wait_ready()
        yield members, data
    finally:
        for member in members:
            member.kill()
            member.ports.close()


def client(
    members: list[Member],
    user: str | None = None,
    password: str | None = None,
    pair: tuple[str, str] | None = (AGENTS_CERT, AGENTS_KEY),
) -> Client:
    """Return a client that trusts the bundle, with an agent's certificate or another."""
    folder = members[0].folder / "tls"
    endpoints = [member.endpoint for member in members]
    cert, key = (folder / pair[0], folder / pair[1]) if pair else (None, None)
    tls = Tls(folder / BUNDLE, cert, key)
    return Client(endpoints, tls=tls, user=user, password=password, request_timeout_seconds=3.0)
