"""Image stores of the nodes, if no registry has the images.

One store is made of all images that every node needs, unpacked by a temporary containerd. A node's
store is a copy of it in hard links: made in a second, and the nodes share the page cache of its
files. The sharing is safe because containerd never writes into unpacked files; its own metadata is
copied.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from scripts.golang import output
from tests.cluster import debian, systemimages, trainer
from tests.cluster.parts import content, part
from tests.cluster.places import NODES, STORES
from tests.cluster.programs import programs

# No plug-in that runs containers, and nothing outside these two folders.
_SETTINGS = """\
version = 3
root = "{store}"
state = "{state}"
disabled_plugins = [
  "io.containerd.cri.v1.images", "io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri",
]
[grpc]
address = "{state}/socket"
[ttrpc]
address = "{state}/socket.ttrpc"
"""


# A store has 6 GB; each image is unpacked in a temporary folder first.
_GIGABYTES = 12
# Unpacked layers are not kept packed as well.
_IMPORT = ("images", "import", "--local", "--discard-unpacked-layers")


@contextmanager
def _containerd(store: Path, scratch: Path) -> Iterator[list[str]]:
    """Run a containerd that keeps images in this store; yield a `ctr` command prefix for it."""
    folder = programs("containerd")
    settings, log = scratch / "containerd.toml", scratch / "log"
    settings.write_text(_SETTINGS.format(store=store, state=scratch / "state"))
    ctr = [str(folder / "ctr"), "--address", f"{scratch}/state/socket", "--namespace", "k8s.io"]
    apart = ("unshare", "--mount", "--propagation", "private")  # containerd mounts what it unpacks
    with log.open("w") as complaints:
        server = subprocess.Popen(
            [*apart, folder / "containerd", "--config", settings],
            stdin=subprocess.DEVNULL,
            stdout=complaints,
            stderr=complaints,
        )
        try:
            deadline = time.monotonic() + 30
            while subprocess.run([*ctr, "version"], capture_output=True, check=False).returncode:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"containerd: {log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield ctr
        finally:
            server.terminate()
            server.wait(timeout=30)


def store() -> Path:
    """Return the store of all images that every node needs."""
    tree, trained = debian.node_tree(), trainer.image()

    def make(into: Path) -> None:
        debian.needs("unshare")
        # A short path: it holds sockets.
        with tempfile.TemporaryDirectory(prefix="elasticjob-") as scratch:
            archives = (systemimages.write(Path(scratch), tree), trained)
            with _containerd(into, Path(scratch)) as ctr:
                for archive in archives:
                    output(*ctr, *_IMPORT, archive)
                output(*ctr, "content", "prune", "references")

    names = ("kubernetes", "containerd", "coredns", "kind", "pause", "storage")
    made_of = [tree, systemimages.etcd(), trained.parent, *(programs(name) for name in names)]
    recipe = content(Path(__file__), Path(systemimages.__file__))
    return part("store", (*(folder.name for folder in made_of), recipe), make, _GIGABYTES)


def give_to_nodes() -> None:
    """Create the store of every node."""
    remove_from_nodes()
    STORES.mkdir(parents=True)
    with ThreadPoolExecutor(len(NODES)) as lanes:
        list(lanes.map(lambda node: _copy(store(), STORES / node), NODES))


def _copy(source: Path, copy: Path) -> None:
    output("cp", "--archive", "--link", source, copy)
    for database in copy.rglob("*.db"):
        own = database.with_suffix(".own")
        shutil.copy2(database, own)
        own.replace(database)


def remove_from_nodes() -> None:
    """Remove the stores of nodes that are gone."""
    with ThreadPoolExecutor(len(NODES)) as lanes:
        list(lanes.map(lambda node: shutil.rmtree(STORES / node, ignore_errors=True), NODES))
    shutil.rmtree(STORES, ignore_errors=True)
