"""Operator process: logging, signals and exit code."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from elasticjob_operator import logs, settings
from elasticjob_operator.kubernetes.client import Kube, KubeError, NoSuchKind
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.replica.active import ActiveReplica
from elasticjob_operator.replica.health import Health, serve_health
from elasticjob_operator.replica.leader import LeaseLost, hold_lease
from elasticjob_operator.settings import Settings, SettingsError

log = logging.getLogger("elasticjob_operator.main")


def serve() -> int:
    """Run the operator; return the exit code: 0 after a signal, 1 on failure, 2 on bad settings."""
    try:
        found = settings.from_environment()
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    logs.configure(found.log_format, found.log_level)
    try:
        asyncio.run(_serve(found))
    except asyncio.CancelledError:
        log.info("stopped by a signal")
    except NoSuchKind as error:
        log.critical("the ElasticJob CRD is not installed (use helm or kubectl apply): %s", error)
        return 1
    except (KubeError, LeaseLost, OSError) as error:
        log.critical("stopping after an error: %s", error)
        return 1
    except Exception:
        log.exception("an internal task failed, exiting so that Kubernetes restarts this container")
        return 1
    return 0


async def _serve(found: Settings) -> None:
    """Stand by, then serve until a signal; raise the error that prevents it."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, task.cancel)
    metrics, health = Metrics(), Health()
    async with (
        serve_health(health, metrics.text, found.health_port, found.metrics_port),
        Kube.connect() as kube,
    ):
        health.ready = True
        async with hold_lease(kube, found.lease):
            metrics.leader.set(1)
            await ActiveReplica(found, kube, metrics, health).run()
