"""Networks of one run: a namespace for each host, and a router between them that can drop packets.

The machine's own network is unchanged: hosts meet in the router's namespace. A cut is a rule of the
router that drops the packets from one host to another, silently and in that direction alone, as a
broken switch does. Only iproute2 and nsenter are needed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.cluster.debian import needs

_FOLDER = Path("/run/netns")
_MARK = "ejpart"
_ROUTER = "router"
_END_SECONDS = 10.0

Cut = tuple[str, str]
"""Lost packets: from the first host to the second."""


def ip(*arguments: str, commands: str = "") -> str:
    """Run iproute2, with `commands` on its standard input; return its output."""
    done = subprocess.run(
        ["ip", *arguments], input=commands, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}\n{commands}")
    return done.stdout


def _started(pid: int) -> str:
    """Return a process's start time, which differs for a reused pid; empty when it ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[19]
    return ""


def _owner() -> str:
    return f"{_MARK}-{os.getpid()}-{_started(os.getpid())}"


def _processes(namespace: str) -> list[int]:
    with suppress(RuntimeError):  # already gone
        return [int(pid) for pid in ip("netns", "pids", namespace).split()]
    return []


def _remove(namespace: str) -> None:
    """Kill all processes of a namespace and delete it."""
    deadline = time.monotonic() + _END_SECONDS
    while pids := _processes(namespace):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {pids} in {namespace} survive SIGKILL")
        time.sleep(0.02)
    with suppress(RuntimeError):
        ip("netns", "delete", namespace)


def sweep() -> None:
    """Remove the networks, with their processes, that earlier runners left behind."""
    for path in _FOLDER.glob(f"{_MARK}-*"):
        _, pid, start, *_ = path.name.split("-")
        if _started(int(pid)) != start:
            _remove(path.name)


class Network:
    """Hosts by name, each with one address, and the cuts between them."""

    def __init__(self, serial: str, hosts: Iterable[str]) -> None:
        self._prefix = f"{_owner()}-{serial}"
        self._router = self._namespace(_ROUTER)
        self._numbers = {host: number for number, host in enumerate(hosts, start=1)}
        self._cuts: set[Cut] = set()

    def _namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def address(self, host: str) -> str:
        return f"10.0.{self._numbers[host]}.2"

    def command(self, host: str, *command: str) -> list[str]:
        """Return the command that runs this one on a host. The process keeps its pid."""
        return ["nsenter", f"--net={_FOLDER / self._namespace(host)}", "--", *command]

    def processes(self, host: str) -> list[int]:
        """Return the processes of a host."""
        return _processes(self._namespace(host))

    def cut(self, cuts: Iterable[Cut]) -> None:
        """Drop these packets from now on, all of them within milliseconds."""
        new = set(cuts) - self._cuts
        self._rules("add", new)
        self._cuts |= new

    def heal(self) -> None:
        self._rules("del", self._cuts)
        self._cuts = set()

    def _rules(self, verb: str, cuts: Iterable[Cut]) -> None:
        lines = [
            f"rule {verb} iif to-{source} to {self.address(target)} blackhole"
            for source, target in sorted(cuts)
        ]
        ip("-n", self._router, "-batch", "-", commands="\n".join(lines) + "\n")

    @contextmanager
    def up(self) -> Iterator[Network]:
        """Create the network; at the end remove it with all its processes."""
        needs("ip", "nsenter")
        if os.geteuid() != 0:
            raise PermissionError("network namespaces need root")
        try:
            self._make()
            yield self
        finally:
            for host in (*self._numbers, _ROUTER):
                _remove(self._namespace(host))

    def _make(self) -> None:
        ip("netns", "add", self._router)
        for host, number in self._numbers.items():
            namespace, link = self._namespace(host), f"to-{host}"
            ip("netns", "add", namespace)
            ends = ("type", "veth", "peer", "name", "eth0", "netns", namespace)
            ip("-n", self._router, "link", "add", link, *ends)
            router = f"10.0.{number}.1"
            ip(
                *("-n", self._router, "-batch", "-"),
                commands=f"address add {router}/24 dev {link}\nlink set {link} up\n",
            )
            ip(
                *("-n", namespace, "-batch", "-"),
                commands=f"address add {self.address(host)}/24 dev eth0\nlink set lo up\n"
                f"link set eth0 up\nroute add default via {router}\n",
            )
        forward = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        subprocess.run(self.command(_ROUTER, "sh", "-c", forward), check=True)
