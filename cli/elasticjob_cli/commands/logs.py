"""Command `elasticjob logs`: output of the nodes or of one worker of a local job."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from elasticjob_cli.commands.options import DEFAULT_NAMESPACE, Name, Namespace, until_interrupted
from elasticjob_cli.errors import BadInput
from elasticjob_cli.local.job_store import JobFolder, find_job
from elasticjob_cli.local.logs import TRAINER, Tail, find_worker, pods_with_output, worker_logs
from elasticjob_cli.output import show_log

POLL_SECONDS = 0.1


def logs(
    name: Name,
    rank: Annotated[
        int | None, typer.Option("--rank", "-r", min=0, help="Only the worker with this rank.")
    ] = None,
    round_number: Annotated[
        int | None,
        typer.Option("--round", min=1, help="Round of the rank. Default: its last round."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow all rounds until the job ends.")
    ] = False,
    namespace: Namespace = DEFAULT_NAMESPACE,
) -> None:
    """Print the output of all nodes or of one worker.

    \b
    Examples:
      elasticjob logs digits -f
      elasticjob logs digits --rank 1 --round 3
    """
    folder = find_job(namespace, name)
    if rank is None:
        if round_number is not None:
            raise BadInput("--round must come with --rank")
        lines = _of_nodes(folder, follow)
    else:
        lines = (("", line) for line in _of_rank(folder, rank, round_number, follow))
    with until_interrupted():
        for prefix, line in lines:
            show_log(prefix, line)


def _of_nodes(folder: JobFolder, follow: bool) -> Iterator[tuple[str, str]]:
    """Yield every container's lines, each after its prefix, the pod's name."""
    tails: dict[str, Tail] = {}
    running = True
    while running:
        running = follow and folder.running()  # before the read, so the last lines are not missed
        for pod in pods_with_output(folder.logs):
            tail = tails.setdefault(pod, Tail(folder.logs / pod / TRAINER))
            yield from ((f"{pod} ", line) for line in tail.lines())
            if not running:
                yield from ((f"{pod} ", line) for line in tail.remainder())
        if running:
            time.sleep(POLL_SECONDS)


def _of_rank(folder: JobFolder, rank: int, number: int | None, follow: bool) -> Iterator[str]:
    """Yield one worker's lines; when following, also those of the rank in later rounds."""
    tails: dict[Path, Tail] = {}
    running = True
    while running:
        running = follow and folder.running()
        assignment = find_worker(folder.rounds(), rank, number)
        for path in worker_logs(folder.logs, assignment):
            tails.setdefault(path, Tail(path))
        for tail in tails.values():
            yield from tail.lines()
            if not running:
                yield from tail.remainder()
        if running:
            time.sleep(POLL_SECONDS)
