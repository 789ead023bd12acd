"""Node in a process of its own: an API agent over a backend, running a function.

Arguments: a JSON object with the backend's parameters, the number of workers and their folder.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from elasticjob_agent.api import LocalElasticAgent, SignalException, WorkerSpec, create_handler
from elasticjob_rendezvous.api import RendezvousParameters
from tests.integration.agent_api import functions


def handler_of(given: dict[str, Any]) -> Any:
    """Return ElasticJob's handler, or the one that torchrun would use."""
    names = (given["backend"], given["endpoint"], given["run_id"], given["least"], given["most"])
    if given["library"] == "ours":
        return create_handler(RendezvousParameters(*names, "127.0.0.1", **given["settings"]))
    from torch.distributed.elastic import rendezvous

    parameters = rendezvous.RendezvousParameters(*names, "127.0.0.1", **given["settings"])
    return rendezvous.rendezvous_handler_registry.create_handler(parameters)


def main() -> int:
    given = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    handler = handler_of(given)
    spec = WorkerSpec(
        role=given["role"],
        local_world_size=given["slots"],
        rdzv_handler=handler,
        entrypoint=functions.waits,
        args=(given["folder"],),
        max_restarts=given["max_restarts"],
        monitor_interval=0.2,
        local_addr="127.0.0.1",
    )
    agent = LocalElasticAgent(spec, exit_barrier_timeout=30, shutdown_timeout=3)
    try:
        result = agent.run()
    except SignalException as told:
        print(f"told to end by {told.sigval.name}")
        return 0
    print(f"restarts={spec.max_restarts - agent._remaining_restarts} state={result.state.value}")
    for rank, failure in result.failures.items():
        print(f"failure of rank {rank}: {failure.exitcode} {failure.message}")
    if handler.get_backend() != "elasticjob":
        handler.shutdown()
    return int(result.is_failed())


if __name__ == "__main__":
    sys.exit(main())
