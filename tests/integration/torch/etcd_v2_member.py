"""Member of a v2 rendezvous in a process of its own, to be stopped and killed.

Reads commands on stdin and answers each with a line of JSON: `enter` with the outcome of
`next_rendezvous`, `waiting` with `num_nodes_waiting`. SIGTERM ends it as it ends an agent.
"""

from __future__ import annotations

import json
import signal
import sys
from types import FrameType

from elasticjob_rendezvous.etcd_v2 import create_rdzv_handler, parameters_from_url


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    signal.signal(signal.SIGTERM, _terminate)
    handler = create_rdzv_handler(parameters_from_url(sys.argv[1]))
    print("{}", flush=True)
    for line in sys.stdin:
        answer: dict[str, object]
        if line.strip() == "waiting":
            answer = {"waiting": handler.num_nodes_waiting()}
        else:
            try:
                info = handler.next_rendezvous()
                answer = {"rank": info.rank, "world": info.world_size, "round": info.round}
            except Exception as error:
                answer = {"error": type(error).__name__}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
