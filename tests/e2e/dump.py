"""Diagnostic dump after a failed test: objects, events, logs, etcd."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired

from tests.e2e.console import Console
from tests.e2e.installation import SYSTEM, Installation


def dump(folder: Path, console: Console, namespaces: list[str]) -> None:
    """Write all information that may explain a failure; skip what cannot be read."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def keep(name: str, *arguments: object) -> str:
        try:
            printed = console.kubectl(*arguments, check=False, seconds=30)
        except TimeoutExpired as error:
            printed = f"{error}\n"
        (folder / name).write_text(printed)
        return printed

    keep("nodes.txt", "get", "nodes", "-o", "wide")
    keep("pods.txt", "get", "pods", "-A", "-o", "wide")
    keep("jobs.txt", "get", "elasticjobs", "-A", "-o", "wide")
    keep("leases.yaml", "-n", SYSTEM, "get", "leases", "-o", "yaml")
    for namespace in [SYSTEM, *namespaces]:
        for kind in ("elasticjobs", "pods", "poddisruptionbudgets,services"):
            keep(f"{namespace}.{kind}.yaml", "-n", namespace, "get", kind, "-o", "yaml")
        keep(
            f"{namespace}.events.txt",
            *("-n", namespace, "get", "events", "--sort-by=.metadata.creationTimestamp"),
        )
        names = console.kubectl("-n", namespace, "get", "pods", "-o", "name", check=False)
        for pod in [name for name in names.split() if name.startswith("pod/")]:
            name = f"{namespace}.{pod.removeprefix('pod/')}"
            logs = ("-n", namespace, "logs", pod, "--all-containers", "--prefix", "--timestamps")
            keep(f"{name}.log", *logs, "--tail=2000")
            if "Last State" in keep(f"{name}.describe", "-n", namespace, "describe", pod):
                keep(f"{name}.previous.log", *logs, "--previous", "--tail=500")
    with suppress(Exception):
        installation = Installation(console)
        status = installation.etcdctl("endpoint", "status", "-w", "table")
        keys = installation.etcdctl("get", "--prefix", "/elasticjob/")
        (folder / "etcd.txt").write_text(f"{status}\n{keys}")
