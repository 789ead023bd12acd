"""Signals, fatal errors and exit codes of the processes of the operator's image."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable

from elasticjob_operator.kubernetes.client import KubeError, NoSuchKind
from elasticjob_operator.replica.leader import LeaseLost

log = logging.getLogger("elasticjob_operator.main")

EXIT_SECONDS = 5.0
"""Maximum duration of the cancellation of tasks that `serve` has left."""


def _exit() -> None:
    os._exit(1)


def run_until_signal(
    serve: Callable[[], Awaitable[None]], abort: Callable[[], None] = _exit
) -> int:
    """Run `serve` until SIGINT or SIGTERM; return the exit code: 0 after a signal, 1 on failure.

    If tasks that `serve` has left do not end, `abort` ends the process.
    """

    def overdue() -> None:
        log.critical("tasks did not end %.0f s after their cancellation, exiting", EXIT_SECONDS)
        abort()

    timer = threading.Timer(EXIT_SECONDS, overdue)  # a thread: the event loop may be blocked
    timer.daemon = True
    try:
        asyncio.run(_cancelled_by_signals(serve, timer))
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
    finally:
        timer.cancel()
    return 0


async def _cancelled_by_signals(
    serve: Callable[[], Awaitable[None]], timer: threading.Timer
) -> None:
    task = asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    try:
        await serve()
    finally:
        timer.start()
