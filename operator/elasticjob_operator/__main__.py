"""`python -m elasticjob_operator` serves jobs; with `certs …` it makes etcd's certificates.

Imports little: the first process of a container ignores SIGTERM for as long as nothing handles it,
and would go on until its pod's grace is over, with the lease of the one that is to follow it.
"""

from __future__ import annotations

import os
import signal
import sys

CERTS = "certs"


def main() -> int:
    """The exit code: 0 when told to end, 1 after a failure, 2 when called wrongly."""
    match sys.argv[1:]:
        case []:
            # Nothing has begun yet that would have to be ended.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
            from elasticjob_operator.process import serve

            return serve()
        case [verb, *arguments] if verb == CERTS:
            from elasticjob_operator.certs import main as certs

            return certs(arguments)
    print(f"usage: python -m elasticjob_operator [{CERTS} …]", file=sys.stderr)  # noqa: T201
    return 2


if __name__ == "__main__":
    sys.exit(main())
