"""Entry point of the operator's process: settings, logging, standby, service."""

from __future__ import annotations

import sys

from elasticjob_operator import logs, settings
from elasticjob_operator.kubernetes.client import Kube
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.replica.active import ActiveReplica
from elasticjob_operator.replica.health import Health, serve_health
from elasticjob_operator.replica.leader import hold_lease
from elasticjob_operator.replica.signals import run_until_signal
from elasticjob_operator.settings import Settings, SettingsError


def serve() -> int:
    """Run the operator; return the exit code: 0 after a signal, 1 on failure, 2 on bad settings."""
    try:
        found = settings.from_environment()
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    logs.configure(found.log_format, found.log_level)
    return run_until_signal(lambda: _serve(found))


async def _serve(found: Settings) -> None:
    """Stand by, then serve; raise the error that prevents it."""
    metrics, health = Metrics(), Health()
    async with (
        serve_health(health, found.health_port, metrics.text, found.metrics_port),
        Kube.connect() as kube,
    ):
        health.ready = True
        async with hold_lease(kube, found.lease) as lease:
            metrics.leader.set(1)
            replica = ActiveReplica(found, kube, metrics, health)
            try:
                await replica.run()
            finally:
                if replica.interrupted:
                    lease.let_expire()
