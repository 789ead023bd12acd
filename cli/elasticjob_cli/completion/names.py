"""Names for completion: local jobs from their folders, the others from a quick kubectl."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from elasticjob_cli.completion.candidates import Place, candidates
from elasticjob_cli.errors import CommandError
from elasticjob_cli.kubectl import RESOURCE, Kubectl, selects_cluster
from elasticjob_cli.settings import state_root
from elasticjob_rendezvous.protocol.text import one_cell, printable

QUICK_SECONDS = 1.0
"""Maximum duration of a request to a cluster; without an answer there are no candidates."""
FILES, NO_FILES = ":0", ":4"


def answer(words: Sequence[str], helps: Mapping[str, str], is_plugin: bool) -> list[str]:
    """Return the lines for a shell; `words` end with the word to complete."""
    table: Mapping[str, Any] = json.loads(
        resources.files("elasticjob_cli.completion").joinpath("table.json").read_bytes()
    )

    def lookup(kind: str, place: Place) -> Sequence[str]:
        try:
            return _names(kind, place, is_plugin)
        except (CommandError, OSError, subprocess.SubprocessError):
            return ()

    *before, incomplete = words or ("",)
    found = candidates(before, incomplete, helps, table, lookup)
    lines = [f"{value}\t{one_cell(text)}" if text else value for value, text in found.values]
    return [*lines, FILES if found.files else NO_FILES]


def _names(kind: str, place: Place, is_plugin: bool) -> list[str]:
    """Return the names of jobs, contexts or namespaces. Raises `CommandError`, OSError."""
    kubeconfig = Path(place.kubeconfig).expanduser() if place.kubeconfig else None
    there = Kubectl(place.namespace, place.context, kubeconfig)
    if kind == "context":
        return _kubectl("config", "get-contexts", "--output=name", *there.where())
    if not selects_cluster(is_plugin, place.cluster, place.context, kubeconfig):
        return _local(kind, place.namespace)
    resource = RESOURCE if kind == "job" else "namespaces"
    names = _kubectl("get", resource, "--output=name", *there.where())
    return [name.rpartition("/")[2] for name in names]


def _local(kind: str, namespace: str | None) -> list[str]:
    root = state_root()
    if kind == "namespace":
        return sorted({path.parent.parent.name for path in root.glob("*/*/status.json")})
    folder = root / (namespace or "default")
    return sorted(path.parent.name for path in folder.glob("*/status.json"))


def _kubectl(*words: str) -> list[str]:
    done = subprocess.run(
        ["kubectl", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        errors="replace",
        timeout=QUICK_SECONDS,
    )
    if done.returncode != 0:  # without credentials its standard output asks for a user
        return []
    return [name for name in done.stdout.split() if printable(name) == name]
