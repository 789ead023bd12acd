"""Entry point: `python -m elasticjob_operator` serves jobs, `… certs` issues etcd's certificates,
`… bind` gives the operator access to the namespaces it serves, `… etcd-data` prepares etcd's data.

Heavy imports happen after the SIGTERM handler is installed: PID 1 of a container ignores SIGTERM
until a handler exists, and would hold the Lease its successor needs for the whole grace period.
"""

from __future__ import annotations

import os
import signal
import sys

CERTS = "certs"
BIND = "bind"
ETCD_DATA = "etcd-data"


def main() -> int:
    """Run the command; return the exit code: 0 after a signal, 1 on failure, 2 on wrong usage."""
    match sys.argv[1:]:
        case []:
            # Nothing is running yet that needs a graceful shutdown.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
            from elasticjob_operator.replica.main import serve

            return serve()
        case [verb, *arguments] if verb == CERTS:
            from elasticjob_operator.etcd_tls.certs_command import main as certs

            return certs(arguments)
        case [verb, *arguments] if verb == BIND:
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
            from elasticjob_operator.role_bindings import main as bind

            return bind(arguments)
        case [verb, *arguments] if verb == ETCD_DATA:
            from elasticjob_operator.etcd_tls.initial_data import main as etcd_data

            return etcd_data(arguments)
    verbs = " | ".join(f"{verb} …" for verb in (CERTS, BIND, ETCD_DATA))
    print(f"usage: python -m elasticjob_operator [{verbs}]", file=sys.stderr)  # noqa: T201
    return 2


if __name__ == "__main__":
    sys.exit(main())
