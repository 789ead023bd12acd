"""One of our nodes on one of torch's backends: runs a script with the agent API.

Argument: a JSON object with the rendezvous' parameters, the script and its arguments.
"""

from __future__ import annotations

import json
import logging
import sys

from elasticjob_agent.api import LocalElasticAgent, SignalException, WorkerSpec, create_handler
from elasticjob_rendezvous.api import RendezvousParameters


def main() -> int:
    given = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    handler = create_handler(
        RendezvousParameters(
            given["backend"],
            given["endpoint"],
            given["run_id"],
            given["least"],
            given["most"],
            "127.0.0.1",
            **given["settings"],
        )
    )
    spec = WorkerSpec(
        role="default",
        local_world_size=1,
        rdzv_handler=handler,
        entrypoint=sys.executable,
        args=tuple(given["command"]),
        max_restarts=given["max_restarts"],
        monitor_interval=0.2,
        local_addr="127.0.0.1",
    )
    try:
        result = LocalElasticAgent(spec, shutdown_timeout=3).run()
    except SignalException as error:
        print(f"stopped by {error.sigval.name}")
        return 0
    return int(result.is_failed())


if __name__ == "__main__":
    sys.exit(main())
