"""Fork safety of gRPC: a forked child gets an error instead of a hang or a crash.

gRPC's threads do not exist in the child: calls hang there, and freeing a gRPC object crashes or
hangs the process. With its own fork support gRPC restarts the threads, but then crashes at random.
That support is therefore disabled, which is only possible when gRPC is imported.
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
    """Import gRPC with its fork support disabled, unless the environment sets the option."""
    if _FORK_SUPPORT in os.environ:
        return
    os.environ[_FORK_SUPPORT] = "0"
    try:
        importlib.import_module("grpc")
    finally:
        del os.environ[_FORK_SUPPORT]  # child processes must not inherit it


_import_grpc()


class _State:
    user: int | None = None
    """Pid of the process that first used gRPC; None before the first use."""


def is_forked() -> bool:
    """Return True if this process was forked after its parent had used gRPC."""
    return _State.user is not None and _State.user != os.getpid()


def use_grpc() -> None:
    """Record that this process uses gRPC.

    Raises:
        RendezvousUnsupportedError: this process was forked after its parent had used gRPC.
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
    """Fork hooks that keep gRPC objects alive in the child; several threads may fork at once."""

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
                gc.disable()  # else the child could collect garbage before `in_child`
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
        for item in self._held:  # never free them, not even the parent's garbage
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
