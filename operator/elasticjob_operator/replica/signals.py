"""Signals, fatal errors and exit codes of the processes of the operator's image."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable

from elasticjob_operator.kubernetes.client import KubeError, NoSuchKind
from elasticjob_operator.replica.leader import LeaseLost

log = logging.getLogger("elasticjob_operator.main")


def run_until_signal(serve: Callable[[], Awaitable[None]]) -> int:
    """Run `serve` until SIGINT or SIGTERM; return the exit code: 0 after a signal, 1 on failure."""
    try:
        asyncio.run(_cancelled_by_signals(serve))
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


async def _cancelled_by_signals(serve: Callable[[], Awaitable[None]]) -> None:
    task = asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    await serve()
