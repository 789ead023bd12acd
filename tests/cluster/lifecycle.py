"""Start and removal of the cluster: `up`, `down`, `found`."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from scripts.environment import locked
from tests.cluster import debian, engine, kind, store, systemimages, trainer
from tests.cluster.cluster import HELM, KUBECTL, Cluster, CommandFailed, ours
from tests.cluster.engine import Engine
from tests.cluster.parts import say
from tests.cluster.places import ARCHIVES, CACHE, CLUSTER, KUBECONFIG, NODES, ROOT, STATE
from tests.cluster.programs import MODULES, programs

_LOCK = CACHE / "cluster.lock"
_READY_SECONDS = 120
_PATIENCE_SECONDS = 60


def found(patience_seconds: float = 0) -> Cluster | None:
    """Return the cluster if its nodes run and it answers within `patience_seconds`."""
    running = engine.running() or _stock_with_nodes()
    if running is None or not KUBECONFIG.exists() or not KUBECTL.exists():
        return None
    names = running.run("ps", "--filter", "status=running", "--format", "{{.Names}}").split()
    if not {*NODES} <= {*names}:
        return None
    cluster = ours(running)
    deadline = time.monotonic() + patience_seconds
    while not _answers(cluster):
        if time.monotonic() > deadline:
            return None
    return cluster


def _answers(cluster: Cluster) -> bool:
    try:
        cluster.kubectl("get", "--raw", "/readyz", timeout=10)
        names = cluster.kubectl("get", "nodes", "--output", "name", timeout=10).split()
    except (CommandFailed, subprocess.TimeoutExpired):
        time.sleep(0.5)
        return False
    return {f"node/{node}" for node in NODES} == {*names}


def up() -> Cluster:
    """Return the running cluster, created if there is none."""
    with locked(_LOCK):
        # Others may be using the cluster: do not remove one that only answers slowly.
        if cluster := found(_PATIENCE_SECONDS):
            return cluster
        _remove()
        ARCHIVES.mkdir(parents=True, exist_ok=True)
        chosen = engine.stock()
        if chosen is None:
            _build()
            chosen = engine.start()
            store.give_to_nodes()
        _link_programs()
        say(f"making the cluster {CLUSTER}")
        kind.create(chosen)
        cluster = ours(chosen)
        wait = ("wait", "--for=condition=Ready", f"--timeout={_READY_SECONDS}s", "--all")
        cluster.kubectl(*wait, "nodes", timeout=_READY_SECONDS + 10)
        cluster.kubectl(*wait, "pods", "--all-namespaces", timeout=_READY_SECONDS + 10)
        return cluster


def down() -> None:
    """Remove the cluster and all that it left on the machine, except the cache."""
    with locked(_LOCK):
        _remove()


def builder_engine(cluster: Cluster | None) -> Engine | None:
    """Return the engine that can build images from a registry, None if there is no registry."""
    chosen = engine.stock() if cluster is None else cluster.engine
    return None if chosen is None or chosen.ours else chosen


def _remove() -> None:
    running = engine.running() or _stock_with_nodes()
    if running is not None and not running.ours:
        kind.delete(running)
    else:
        if running is not None:
            with suppress(RuntimeError, subprocess.TimeoutExpired):
                engine.clear(running)  # faster than kind; the rest ends with the engine
        engine.stop()
        store.remove_from_nodes()
    for left in (KUBECONFIG, KUBECONFIG.with_suffix(".lock"), STATE / "kind.json"):
        left.unlink(missing_ok=True)


def _stock_with_nodes() -> Engine | None:
    """Return the machine's own engine if it contains nodes of the test cluster."""
    chosen = engine.of_machine()
    if chosen is None or not chosen.run("ps", "--all", "--quiet", "--filter", f"name={NODES[0]}"):
        return None
    return chosen


def _build() -> None:
    """Make all missing parts: compilation in parallel with downloads."""
    if not (systemimages.etcd() / "etcdctl").exists():
        command = [sys.executable, "-m", "scripts.etcd_servers", str(CACHE)]
        subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, check=True)
    with ThreadPoolExecutor(2) as lanes:
        trees = lanes.submit(lambda: [debian.node_tree(), debian.engine_tree(), trainer.image()])
        built = lanes.submit(lambda: [programs(name) for name in MODULES])
        trees.result()
        built.result()


def _link_programs() -> None:
    """Link kubectl and Helm into a folder of their own, for the user's PATH."""
    KUBECTL.parent.mkdir(exist_ok=True)
    for link, module in ((KUBECTL, "kubernetes"), (HELM, "helm")):
        link.unlink(missing_ok=True)
        link.symlink_to(programs(module) / link.name)
