"""gRPC across a fork: a forked child gets an error instead of a hang or a crash.

gRPC's threads do not exist in the child: calls hang there, and to free an object of gRPC's
crashes it or hangs. Where gRPC starts its threads anew it crashes at any moment; so it is told not
to, which it can be when it is imported, and not later.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import threading

from elasticjob_rendezvous.api import RendezvousUnsupportedError

_FORK_SUPPORT = "GRPC_ENABLE_FORK_SUPPORT"


def _import_grpc() -> None:
    """Import gRPC without its support of forks, unless the environment has a word on that."""
    if _FORK_SUPPORT in os.environ:
        return
    os.environ[_FORK_SUPPORT] = "0"
    try:
        importlib.import_module("grpc")
    finally:
        del os.environ[_FORK_SUPPORT]  # not for our children


_import_grpc()


class _State:
    user: int | None = None
    """The process that used gRPC first; None before the first use."""


def is_forked() -> bool:
    """Return whether gRPC was used already when this process was forked."""
    return _State.user is not None and _State.user != os.getpid()


def use_grpc() -> None:
    """Note that this process uses gRPC.

    Raises:
        RendezvousUnsupportedError: gRPC was used already when this process was forked.
    """
    if _State.user is None:
        _State.user = os.getpid()
    if is_forked():
        raise RendezvousUnsupportedError(
            f"process {os.getpid()} was forked after process {_State.user} had used the etcd v3 "
            "rendezvous, and gRPC does not work after a fork: start it with spawn or forkserver, "
            "or fork before the rendezvous is first used"
        )


class _Fork:
    """A fork from before to after it; several threads may fork at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forks = 0
        self._collects = False
        self._held: list[object] = []

    def before(self) -> None:
        if _State.user is None:
            return
        with self._lock:
            if self._forks == 0:
                self._collects = gc.isenabled()
                gc.disable()  # or a collection in the child comes before `in_child`
            self._forks += 1
            self._held = [item for item in gc.get_objects() if _is_grpcs(item)]

    def in_parent(self) -> None:
        with self._lock:
            if self._forks == 0:
                return
            self._forks -= 1
            if self._forks == 0:
                self._held = []
                if self._collects:
                    gc.enable()

    def in_child(self) -> None:
        self._lock = threading.Lock()
        if self._forks == 0:
            return
        for item in self._held:  # garbage of the parent's included: never to be freed
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))
        self._forks, self._held = 0, []
        if self._collects:
            gc.enable()


def _is_grpcs(item: object) -> bool:
    return str(type(item).__module__).startswith("grpc._cython")


_fork = _Fork()
os.register_at_fork(
    before=_fork.before, after_in_parent=_fork.in_parent, after_in_child=_fork.in_child
)
