"""Children forked after the use of an etcd v3 handler: prints the end of each.

python -m tests.integration.rendezvous.forked_handlers ETCD_V3
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from elasticjob_agent.api import DirectedHandler
from elasticjob_rendezvous.api import RendezvousParameters
from elasticjob_rendezvous.etcd.handler import EtcdV3RendezvousHandler, create_handler

CHILD_SECONDS = 60


def handler(endpoint: str, run_id: str) -> EtcdV3RendezvousHandler:
    return create_handler(
        RendezvousParameters(
            "elasticjob", endpoint, run_id, 1, 1, "127.0.0.1", last_call_timeout=0.1, timeout=10
        )
    )


def directed(endpoint: str) -> DirectedHandler:
    from elasticjob_agent.api import create_handler as create

    made = create(
        RendezvousParameters("elasticjob", endpoint, "directed", 1, 1, "127.0.0.1", timeout=10)
    )
    assert isinstance(made, DirectedHandler)
    return made


def forked(name: str, work: Callable[[], object]) -> None:
    """Run the work in a child, which then frees all its objects."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(CHILD_SECONDS)
        try:
            said = repr(work())
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(told, said.encode())
        gc.collect()
        sys.exit(0)
    os.close(told)
    with os.fdopen(ready, "rb") as words:
        said = words.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps({"name": name, "said": said, "code": code}), flush=True)


def main(endpoint: str) -> None:
    def fresh() -> Any:
        made = handler(endpoint, f"fresh-{os.getpid()}")
        rank = made.next_rendezvous().rank
        return rank, made.shutdown()

    forked("before", fresh)
    _after_use(handler(endpoint, "used"), endpoint, fresh)
    forked("after its shutdown", lambda: None)
    forked("new after its shutdown", fresh)


def _after_use(used: EtcdV3RendezvousHandler, endpoint: str, fresh: Callable[[], object]) -> None:
    used.next_rendezvous()
    forked("nothing", lambda: None)
    forked("next_rendezvous", used.next_rendezvous)
    forked("num_nodes_waiting", used.num_nodes_waiting)
    forked("is_closed", used.is_closed)
    forked("set_closed", used.set_closed)
    forked("is_registered", lambda: used.is_registered)
    forked("shutdown", used.shutdown)
    forked("get_run_id", used.get_run_id)
    forked("new", fresh)
    forked("directed", lambda: directed(endpoint).next_rendezvous())
    waiting, closed = used.num_nodes_waiting(), used.is_closed()
    print(json.dumps({"name": "parent", "said": repr((waiting, closed)), "code": 0}))
    again = used.next_rendezvous().round
    print(json.dumps({"name": "again", "said": repr((again, used.shutdown())), "code": 0}))


if __name__ == "__main__":
    main(sys.argv[1])
