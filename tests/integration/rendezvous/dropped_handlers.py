"""Handlers dropped without `shutdown`, in a process of its own: prints their remains.

python -m tests.integration.rendezvous.dropped_handlers ETCD_V2 ETCD_V3

The garbage collector is off: a handler must go with its last reference.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.etcd_server import Ports

SECONDS = 60.0
CHILD_SECONDS = 60
SETTINGS = {"last_call_timeout": 1, "keep_alive_interval": 1}


def torchs(backend: str, endpoint: str, **settings: Any) -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    return get_rendezvous_handler(
        RendezvousParameters(backend, endpoint, "torchs", 1, 1, "127.0.0.1", **settings)
    )


def ours(backend: str, endpoint: str, **settings: Any) -> Any:
    from elasticjob_agent.api import create_handler
    from elasticjob_rendezvous.api import RendezvousParameters

    return create_handler(
        RendezvousParameters(backend, endpoint, "ours", 1, 1, "127.0.0.1", **settings)
    )


def threads() -> set[str]:
    """Return the names of this process's threads, except the main one and gRPC's own."""
    names = {thread.name for thread in threading.enumerate()}
    return {name for name in names if name != "MainThread" and "_poll_wrapper" not in name}


def listening() -> int:
    """Return the number of listening sockets of this process."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]
    ]
    return sum(words[3] == "0A" and words[9] in inodes for words in lines)


def goes(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def forked() -> int:
    """Return the exit code of a child that frees all its objects."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_SECONDS)
        gc.enable()
        gc.collect()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def case(name: str, make: Callable[[], Any], rounds: int) -> None:
    before, ports = threads(), listening()
    handler = make()
    for _ in range(rounds):
        handler.next_rendezvous()
    held = weakref.ref(handler)
    worked = threads() - before
    del handler
    found = {
        "name": name,
        "worked": len(worked) > 0 or rounds == 0,
        "gone": held() is None,
        "threads": goes(lambda: threads() <= before),
        "ports": goes(lambda: listening() <= ports),
        "child": forked(),
    }
    print(json.dumps(found), flush=True)


def free_port() -> int:
    held = Ports(1)
    held.close()
    return held.numbers[0]


def main(v2: str, v3: str) -> None:
    gc.disable()
    for make in (ours, torchs):  # ours imports torch on first use
        for rounds in (0, 2):
            store = f"127.0.0.1:{free_port()}"
            settings = {**SETTINGS, "is_host": True}
            name = f"{make.__name__}-{{}}-{rounds}"
            case(name.format("c10d"), lambda: make("c10d", store, **settings), rounds)  # noqa: B023
            files = {**SETTINGS, "store_type": "file"}
            case(name.format("file"), lambda: make("c10d", "", **files), rounds)  # noqa: B023
            case(name.format("etcd-v2"), lambda: make("etcd-v2", v2, **SETTINGS), rounds)  # noqa: B023
            if make is ours:
                last_call = {"last_call_timeout": 0.1}
                case(name.format("etcd"), lambda: ours("etcd", v2, **last_call), rounds)  # noqa: B023
                case(name.format("elasticjob"), lambda: ours("elasticjob", v3, **last_call), rounds)  # noqa: B023


if __name__ == "__main__":
    main(*sys.argv[1:])
