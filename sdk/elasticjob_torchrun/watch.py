"""Watch of the workers that torch's agent started: their exits, at once and with their cause.

torch's agent polls its workers, and after a failure waits up to 30 s for the others before anyone
reports it. This watch sees each exit when it happens and leaves the process to torch, which
reaps it. Older Pythons have no `os.pidfd_open`; a poll replaces it.
"""

from __future__ import annotations

import os
import select
import shutil
import threading
from typing import Any, Callable, Mapping

LOOK_SECONDS = 0.02
STALL_SECONDS = 0.2


class Exit:
    """Exit of a worker, by exit code or by signal."""

    def __init__(self, local_rank: int, pid: int, code: int | None, signum: int | None) -> None:
        self.local_rank = local_rank
        self.pid = pid
        self.code = code
        self.signum = signum


class Watch:
    """Watch of one round's workers, in a thread of its own.

    Args:
        agent: torch's agent.
        started: called with the workers' pids by local rank.
        exited: called with each exit.
    """

    def __init__(
        self,
        agent: Any,
        started: Callable[[Mapping[int, int]], None],
        exited: Callable[[Exit], None],
    ) -> None:
        self._agent = agent
        self._before = getattr(agent, "_pcontext", None)
        self._started = started
        self._exited = exited
        self._over = threading.Event()
        self.error_files: Mapping[int, str] = {}
        threading.Thread(target=self._run, name="elasticjob-watch", daemon=True).start()

    def end(self) -> None:
        self._over.set()

    def _run(self) -> None:
        while True:
            context = getattr(self._agent, "_pcontext", None)
            if context is not None and context is not self._before:
                break
            if self._over.wait(LOOK_SECONDS):
                return
        self.error_files = getattr(context, "error_files", None) or {}
        pids = {int(rank): int(pid) for rank, pid in context.pids().items()}
        self._started(pids)
        self._follow(pids)

    def _follow(self, pids: dict[int, int]) -> None:
        poll = select.poll()
        descriptors = {}
        for pid in pids.values():
            descriptor = _pidfd(pid)
            if descriptor is not None:
                descriptors[pid] = descriptor
                poll.register(descriptor, select.POLLIN)
        seconds = STALL_SECONDS if len(descriptors) == len(pids) else LOOK_SECONDS
        left = dict(pids)
        while left and not self._over.is_set():
            for local_rank, pid in list(left.items()):
                over, found = _exit_of(local_rank, pid)
                if not over:
                    continue
                del left[local_rank]
                if pid in descriptors:
                    poll.unregister(descriptors[pid])
                    os.close(descriptors.pop(pid))
                if found is not None:
                    self._exited(found)
            if left:
                poll.poll(seconds * 1000)
        for descriptor in descriptors.values():
            os.close(descriptor)


def _pidfd(pid: int) -> int | None:
    opened = getattr(os, "pidfd_open", None)
    try:
        return None if opened is None else int(opened(pid))
    except OSError:
        return None


def _exit_of(local_rank: int, pid: int) -> tuple[bool, Exit | None]:
    """Return True if the worker ended, with its exit unless torch has reaped it already."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True, None
    if found is None:
        return False, None
    if found.si_code == os.CLD_EXITED:
        return True, Exit(local_rank, pid, found.si_status, None)
    return True, Exit(local_rank, pid, None, found.si_status)


def copy_error_file(source: str, target: str) -> None:
    """Copy the error file that a worker wrote to the path where the pod's agent reads it."""
    if not source or not target or source == target:
        return
    draft = f"{target}.draft"
    try:
        shutil.copyfile(source, draft)
        os.replace(draft, target)  # noqa: PTH105
    except OSError:
        pass  # the worker wrote none, or the disk is full: its exit is known all the same
