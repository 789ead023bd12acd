"""Shared use of the cluster: tests borrow it, the last borrower takes down what tests brought up.

Every borrowing process records its id. A cluster brought up by a person is never taken down.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from scripts.environment import locked
from tests.cluster import lifecycle
from tests.cluster.cluster import Cluster, existing
from tests.cluster.places import CACHE

_USERS = CACHE / "cluster-users"
_OURS = "brought-up-by-tests"


class Ledger:
    """Record of the processes that use something shared, and of whether tests brought it up."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def open(self) -> Iterator[None]:
        """Hold the ledger's lock: one process at a time reads and writes it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        with locked(self._folder / "lock"):
            yield

    def enter(self, user: int, *, brought_up: bool) -> None:
        """Record a user, and that tests brought up the shared thing if `brought_up`."""
        (self._folder / f"{user}").touch()
        if brought_up:
            (self._folder / _OURS).touch()

    def leave(self, user: int) -> bool:
        """Remove a user; return True if tests brought it up and no user is left."""
        (self._folder / f"{user}").unlink(missing_ok=True)
        return self.brought_up() and not self.users()

    def users(self) -> list[int]:
        """Return the recorded processes that still run."""
        names = [path.name for path in self._folder.iterdir() if path.name.isdecimal()]
        return [int(name) for name in names if _lives(name)]

    def brought_up(self) -> bool:
        """Return True if tests brought up the shared thing."""
        return (self._folder / _OURS).exists()

    def close(self) -> None:
        """Clear the mark that tests brought up the cluster, which is gone or now a person's."""
        (self._folder / _OURS).unlink(missing_ok=True)


def _lives(process: str) -> bool:
    return Path("/proc", process).exists()


def keep() -> None:
    """Keep the running cluster after the last test that uses it."""
    ledger = Ledger(_USERS)
    with ledger.open():
        ledger.close()


def ends_with_tests(cluster: Cluster) -> bool:
    """Return True if the last of the tests that use this cluster now takes it down."""
    ledger = Ledger(_USERS)
    with ledger.open():
        return cluster.engine is not None and ledger.brought_up()


@contextmanager
def borrowed() -> Iterator[Cluster]:
    """Yield the cluster, brought up if absent; the last borrower takes it down."""
    ledger = Ledger(_USERS)
    with ledger.open():
        brought_up = lifecycle.found(patience_seconds=60) is None
        cluster = lifecycle.up()
        ledger.enter(os.getpid(), brought_up=brought_up)
    try:
        yield cluster
    finally:
        with ledger.open():
            if ledger.leave(os.getpid()):
                lifecycle.down()
                ledger.close()


def named(environment: Mapping[str, str]) -> Cluster | None:
    """Return the cluster named by `CLUSTER=existing CLUSTER_CONTEXT=<name>`, None if CLUSTER is
    unset.

    The context is mandatory: tests that inject faults must not run on whichever context is current.
    """
    wanted = environment.get("CLUSTER", "")
    if not wanted:
        return None
    if wanted != "existing":
        raise ValueError(f"CLUSTER={wanted} must be CLUSTER=existing, or absent")
    context = environment.get("CLUSTER_CONTEXT", "")
    if not context:
        raise ValueError("CLUSTER=existing needs CLUSTER_CONTEXT=<a context of your kubeconfig>")
    found = {name: shutil.which(name) for name in ("kubectl", "helm")}
    if missing := [name for name, place in found.items() if place is None]:
        raise ValueError(f"CLUSTER=existing needs {' and '.join(missing)} on PATH")
    kubeconfig = environment.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
    return existing(
        Path(kubeconfig), Path(str(found["kubectl"])), Path(str(found["helm"])), context
    )
