"""Container engine: the machine's own if it can pull the stock images, otherwise a private one.

The private engine is Debian's dockerd in its own namespaces: it neither sees nor touches the
machine's network, and all its processes end with its first process. A veth pair joins the two
networks, so that the machine reaches the ports that the engine publishes on its end.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from scripts.golang import output
from tests.cluster import machine
from tests.cluster.debian import engine_tree, inside, needs
from tests.cluster.nodeimage import node_image, node_image_name
from tests.cluster.parts import say
from tests.cluster.places import KUBERNETES_VERSION, PINS, STATE

STOCK_IMAGE = f"kindest/node:{KUBERNETES_VERSION}"

_NETWORK = "elasticjob-cluster"  # the network namespace
_OUTER, _INNER = "ej-cluster", "ej-machine"  # the ends of the veth pair
# Documentation address ranges for the veth pair: the first unused one is taken.
_RANGES = ("198.51.100", "203.0.113")
_SOCKET = STATE / "docker.sock"
_CAP_SYS_RESOURCE = 24


@dataclass(frozen=True, slots=True)
class Engine:
    """Running engine, as kind and the fault controls need it."""

    docker: Path
    state: str  # path of the folder STATE inside the engine
    environment: dict[str, str] = field(default_factory=dict)
    image: str = ""  # node image
    api_address: str = ""  # address at which to publish the API server

    @property
    def ours(self) -> bool:
        """True if the private engine: started, and stopped, by this package."""
        return bool(self.environment)

    def settings(self) -> dict[str, str]:
        """Return the environment in which programs find this engine."""
        path = f"{self.docker.parent}:{os.environ.get('PATH', '')}"
        return {**os.environ, **self.environment, "PATH": path}

    def run(
        self, *words: object, stdin: bytes | None = None, timeout: float = 60, check: bool = True
    ) -> str:
        """Run docker against this engine and return its output."""
        return self.call(self.docker, *words, stdin=stdin, timeout=timeout, check=check)

    def call(
        self,
        program: Path,
        *words: object,
        stdin: bytes | None = None,
        timeout: float = 60,
        check: bool = True,
    ) -> str:
        """Run a program that uses this engine and return its output."""
        done = subprocess.run(
            [str(program), *map(str, words)],
            input=stdin if stdin is not None else b"",
            env=self.settings(),
            capture_output=True,
            timeout=timeout,
            check=False,
        )
        if check and done.returncode:
            complaint = done.stderr.decode(errors="replace").strip()
            raise RuntimeError(f"{program.name} {' '.join(map(str, words[:6]))}: {complaint}")
        return done.stdout.decode(errors="replace")


def wait_until(done: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until `done` is True; raise TimeoutError naming `what` after these seconds."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} took more than {seconds:.0f} s")
        time.sleep(0.1)


def of_machine() -> Engine | None:
    """Return the machine's own engine, None if none answers."""
    docker = shutil.which("docker")
    if docker is None:
        return None
    engine = Engine(Path(docker), str(STATE), image=STOCK_IMAGE, api_address="127.0.0.1")
    try:
        engine.run("info", timeout=20)
    except (RuntimeError, subprocess.TimeoutExpired):
        return None
    return engine


def stock() -> Engine | None:
    """Return the machine's own engine if it answers and can pull the stock node image."""
    engine = of_machine()
    if engine is None or engine.run("images", "--quiet", STOCK_IMAGE):
        return engine
    try:
        engine.run("pull", "--quiet", STOCK_IMAGE, timeout=600)
    except (RuntimeError, subprocess.TimeoutExpired):
        say(f"{engine.docker} cannot pull {STOCK_IMAGE}: building a node image")
        return None
    return engine


def running() -> Engine | None:
    """Return the private engine if it runs."""
    engine = Engine(STATE / "path" / "docker", "/run/state", {"DOCKER_HOST": f"unix://{_SOCKET}"})
    if not (engine.docker.exists() and _SOCKET.exists()):
        return None
    try:
        engine.run("version", timeout=10)
    except (RuntimeError, subprocess.TimeoutExpired):
        return None
    return engine


def start() -> Engine:
    """Start the private engine, with nothing in it but the node image."""
    image, tree = node_image(), engine_tree()
    needs("ip", "nsenter", "unshare")
    stop()
    machine.prepare()
    _write_client(tree)
    address = _make_network()
    command = inside(
        tree,
        {STATE: "/run/state", PINS: "/run/pins"},
        *("/usr/bin/tini", "--", "/usr/sbin/dockerd", "--host", "unix:///run/state/docker.sock"),
        *("--pidfile", "/run/docker.pid", "--exec-root", "/run/docker"),
        *("--data-root", "/run/state/engine", "--cgroup-parent", machine.CGROUP),
        *("--add-runtime", "without-resource=/run/pins/runc_without_resource.py"),
        *("--default-runtime", "runc" if _can_give(_CAP_SYS_RESOURCE) else "without-resource"),
    )
    server = _spawn(["nsenter", f"--net=/run/netns/{_NETWORK}", *command], STATE / "engine.log")
    ended = partial(os.waitpid, server, os.WNOHANG)
    wait_until(lambda: ended() != (0, 0) or running() is not None, 60, "the engine's start")
    engine = running()
    if engine is None:
        raise RuntimeError(f"the engine ended: {(STATE / 'engine.log').read_text()[-2000:]}")
    engine = replace(engine, image=node_image_name(image), api_address=address)
    clear(engine)  # containers left by an abrupt end
    _load(engine, image / "image.tar")
    return engine


def _spawn(command: list[str], log: Path) -> int:
    """Start a process that outlives this one; return its process id."""
    # Popen would warn at its deletion that the process still runs.
    return os.posix_spawnp(
        command[0],
        command,
        os.environ,
        file_actions=(
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ),
        setsid=True,
    )


def clear(engine: Engine) -> None:
    """Remove every container of the private engine, and its volumes."""
    left = engine.run("ps", "--all", "--quiet").split()
    remove = ("rm", "--force", "--volumes")
    with ThreadPoolExecutor(len(left) or 1) as lanes:
        list(lanes.map(lambda container: engine.run(*remove, container), left))
    engine.run("volume", "prune", "--force")


def _load(engine: Engine, archive: Path) -> None:
    """Load the node image unless present, and remove older ones."""
    listed = engine.run("images", "--format", "{{.Repository}}:{{.Tag}} {{.ID}}").splitlines()
    there = dict(line.split() for line in listed)
    if engine.image not in there:
        say("loading the node image")
        with archive.open("rb") as content:
            subprocess.run(
                [str(engine.docker), "load", "--quiet"],
                stdin=content,
                stdout=subprocess.DEVNULL,
                env=engine.settings(),
                check=True,
            )
    if old := {image for name, image in there.items() if name != engine.image}:
        engine.run("rmi", "--force", *old)


def stop() -> None:
    """Stop the private engine and all that it started; leave nothing of it on the machine."""
    if _NETWORK in _networks():
        for process in output("ip", "netns", "pids", _NETWORK).split():
            with suppress(ProcessLookupError):  # it ended with another of them
                os.kill(int(process), signal.SIGKILL)
        wait_until(lambda: output("ip", "netns", "pids", _NETWORK) == "", 30, "the engine's end")
        output("ip", "netns", "delete", _NETWORK)
    if Path("/sys/class/net", _OUTER).exists():  # removed with the namespace too, but later
        output("ip", "link", "delete", _OUTER)
    wait_until(machine.restored, 30, "the end of the nodes' processes")
    for left in ("docker.sock", "engine.log"):
        (STATE / left).unlink(missing_ok=True)


def _networks() -> set[str]:
    folder = Path("/run/netns")
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def _can_give(capability: int) -> bool:
    status = Path("/proc/self/status").read_text()
    bounding = int(status.partition("CapBnd:")[2].split()[0], base=16)
    return bool(bounding & 1 << capability)


def _write_client(tree: Path) -> None:
    """Write a `docker` wrapper for the tree's client: the machine's may be too new."""
    libraries = next((tree / "usr" / "lib").glob("*-linux-gnu"))
    loader = next(libraries.glob("ld-linux*.so.*"))
    client = STATE / "path" / "docker"
    client.parent.mkdir(exist_ok=True)
    client.write_text(
        f'#!/bin/sh\nexec {loader} --library-path {libraries} {tree}/usr/bin/docker "$@"\n'
    )
    client.chmod(0o755)


def _make_network() -> str:
    """Make the engine's network, joined with the machine's; return the engine's address in it."""
    unused = [subnet for subnet in _RANGES if _is_unused(f"{subnet}.1")]
    if not unused:
        raise RuntimeError(f"this machine has routes into {' and '.join(_RANGES)}: none is free")
    subnet = unused[0]
    inside = ("ip", "-n", _NETWORK)
    output("ip", "netns", "add", _NETWORK)
    output("ip", "link", "add", _OUTER, "type", "veth", "peer", "name", _INNER, "netns", _NETWORK)
    output("ip", "address", "add", f"{subnet}.1/30", "dev", _OUTER)
    output(*inside, "address", "add", f"{subnet}.2/30", "dev", _INNER)
    output(*inside, "link", "set", "lo", "up")
    output(*inside, "link", "set", _INNER, "up")
    output("ip", "link", "set", _OUTER, "up")
    return f"{subnet}.2"


def _is_unused(address: str) -> bool:
    """Return True if only default routes match the address on this machine."""
    known = output("ip", "-o", "route", "show", "table", "all", "match", address).splitlines()
    return all(line.startswith("default") for line in known)
