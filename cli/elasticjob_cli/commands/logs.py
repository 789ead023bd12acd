"""Command `elasticjob logs`: output of a job's pods, merged by time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated

import typer

from elasticjob_cli.commands.options import Name, Place, placed, until_interrupted
from elasticjob_cli.errors import BadInput
from elasticjob_cli.local.job_store import JobFolder, find_job
from elasticjob_cli.local.logs import TRAINER, Tail, find_worker, pods_with_output
from elasticjob_cli.log_lines import (
    Line,
    LogOptions,
    check_rank,
    check_round,
    duration,
    merged,
    parsed_lines,
    parsed_rounds,
    selected,
)
from elasticjob_cli.output import show, show_log

POLL_SECONDS = 0.1


@placed
def logs(
    place: Place,
    name: Name,
    rank: Annotated[
        int | None, typer.Option("--rank", "-r", min=0, help="Only the worker with this rank.")
    ] = None,
    round_number: Annotated[
        int | None, typer.Option("--round", min=1, help="Only this round.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow all rounds until the job ends.")
    ] = False,
    pod: Annotated[
        str | None, typer.Option("--pod", help="Only this pod.", show_default=False)
    ] = None,
    tail: Annotated[
        int | None, typer.Option("--tail", min=0, help="Only this number of last lines.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="DURATION",
            show_default=False,
            help="Only lines of the last 30s, 10m or 2h.",
        ),
    ] = None,
    timestamps: Annotated[
        bool, typer.Option("--timestamps", help="Print the time of each line, in UTC.")
    ] = False,
) -> None:
    """Print the output of all nodes or of one worker.

    The lines of the pods are merged by time. A line marks the beginning of each round, with its
    number of nodes and its cause.

    \b
    Examples:
      elasticjob logs digits -f
      elasticjob logs digits --rank 1 --round 3
      kubectl elasticjob logs digits --since 10m --timestamps
    """
    past = None if since is None else duration(since)
    options = LogOptions(pod, rank, round_number, tail, past, timestamps, follow)
    if place.kubectl is None:
        lines = local_lines(find_job(place.namespace, name), options)
    else:
        from elasticjob_cli.commands.cluster_logs import cluster_lines  # loads the API's models

        lines = cluster_lines(place.kubectl, name, options)
    printed = False
    with until_interrupted():
        for line in lines:
            printed = True
            when = f"{line.time} " if timestamps else ""
            show_log(f"{when}{line.pod}{' ' if line.pod else ''}", line.text)
    if not printed and not follow:
        chosen = any(each is not None for each in (rank, round_number, pod, tail, since))
        show(f"{name}: no line matches the options" if chosen else f"{name}: no output", err=True)


def local_lines(folder: JobFolder, options: LogOptions) -> Iterator[Line]:
    """Return the chosen lines of a local job. Raises `BadInput`."""
    check_round(parsed_rounds(folder.rounds()), options.round)
    if options.rank is not None:
        check_rank(_launch(folder), options.rank)
    if options.rank is not None and not options.follow:
        find_worker(folder.rounds(), options.rank, options.round)
    if options.pod is not None and not options.follow:
        pods = pods_with_output(folder.logs)
        if options.pod not in pods:
            there = ", ".join(pods) or "none"
            raise BadInput(f'pod "{options.pod}" has no output; pods with output: {there}')
    batches = _batches(folder, options)
    return selected(batches, options, datetime.now(UTC), lambda: parsed_rounds(folder.rounds()))


def _launch(folder: JobFolder) -> str | None:
    """Return the launch of the job's command; None if its status has none."""
    launch = (folder.object().get("status") or {}).get("launch")
    return launch.get("mode") if isinstance(launch, dict) else None


def _batches(folder: JobFolder, options: LogOptions) -> Iterator[Iterator[Line]]:
    """Yield all lines so far, merged; when following, also later ones until the job ends."""
    tails: dict[str, Tail] = {}
    last: dict[str, str] = {}
    running = True
    while running:
        running = options.follow and folder.running()  # before the read: its last lines count
        pods = [pod for pod in pods_with_output(folder.logs) if options.pod in (None, pod)]
        for pod in pods:
            tails.setdefault(pod, Tail(folder.logs / pod / TRAINER))
        yield merged(_read(pod, tails[pod], last, whole=not running) for pod in pods)
        if running:
            time.sleep(POLL_SECONDS)


def _read(pod: str, tail: Tail, last: dict[str, str], whole: bool) -> Iterator[Line]:
    """Yield the new lines of a pod; `last` keeps the time of its newest line."""

    def lines() -> Iterator[str]:
        yield from tail.lines()
        if whole:
            yield from tail.remainder()

    for line in parsed_lines(pod, lines(), last.get(pod, "")):
        last[pod] = line.time
        yield line
