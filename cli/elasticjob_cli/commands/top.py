"""Command `elasticjob top`: nodes, workers and steps of running jobs, refreshed at a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from elasticjob_cli.commands.options import (
    Output,
    Place,
    as_json,
    as_yaml,
    placed,
    until_interrupted,
)
from elasticjob_cli.commands.tables import INVALID, NONE, Cells, aligned
from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.kubectl import Kubectl
from elasticjob_cli.local.job_store import JobFolder, find_job, list_jobs
from elasticjob_cli.output import can_redraw, clear_screen, show, show_text, terminal_width
from elasticjob_operator.enums import Phase

Json = dict[str, Any]
COLUMNS = (
    "NAME", "PHASE", "NODES", "WORKERS", "STEP", "STEPS/S", "ROUND", "RECOVERY ms", "GOODPUT %",
)  # fmt: skip
SAMPLE_SECONDS = 1.0
"""Time between the two readings of a single table."""
REFRESH_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Reading:
    """Job at one moment.

    Args:
        at: monotonic seconds.
        step: newest step of its workers; None while none is reported.
    """

    document: Json
    at: float
    step: int | None

    @property
    def key(self) -> tuple[str, str]:
        job = Cells(self.document)
        return job.text("metadata", "namespace"), job.text("metadata", "name")


class Rates:
    """Steps a second of each job, between the last two readings at which its step had changed.

    A status on a cluster has a step up to a minute old: the rate is of the time between two
    changes.
    """

    def __init__(self) -> None:
        self._changed: dict[tuple[str, str], Reading] = {}
        self._rates: dict[tuple[str, str], float] = {}

    def take(self, now: Reading) -> float | None:
        """Return the rate after this reading; None while it is unknown."""
        before = self._changed.get(now.key)
        if now.step is None or before is None or before.step is None or now.step < before.step:
            self._changed[now.key] = now
            self._rates.pop(now.key, None)
        elif now.step > before.step:
            self._changed[now.key] = now
            self._rates[now.key] = (now.step - before.step) / (now.at - before.at)
        return self._rates.get(now.key)


@placed
def top(
    place: Place,
    name: Annotated[
        str | None, typer.Argument(help="Name of a job. Default: all running.", metavar="NAME")
    ] = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Print one table, also at a terminal.")
    ] = False,
    output: Annotated[
        Output | None, typer.Option("--output", "-o", help="Output format, of one reading.")
    ] = None,
) -> None:
    """Show nodes, workers, steps, the last recovery and the goodput of running jobs.

    At a terminal the table is refreshed until Ctrl-C. The steps on a cluster are those of the
    status, up to a minute old. Jobs whose scripts take snapshots and report steps have a goodput.

    \b
    Examples:
      elasticjob top
      elasticjob top digits --once
      kubectl elasticjob top -A
    """
    if name is not None and all_namespaces:
        raise BadInput("--all-namespaces must come without a name")
    rates = Rates()

    def read() -> list[tuple[Reading, float | None]]:
        if place.kubectl is not None:
            found = _there(place.kubectl, name, all_namespaces)
        else:
            found = _here(place.namespace, name, all_namespaces)
        chosen = [one for one in found if name is not None or _is_running(one.document)]
        return [(one, rates.take(one)) for one in sorted(chosen, key=lambda one: one.key)]

    with until_interrupted():
        if output or once or not can_redraw():
            read()
            if place.kubectl is None:
                time.sleep(SAMPLE_SECONDS)
            _print(read(), all_namespaces, output)
            return
        while True:
            readings = read()
            clear_screen()
            _print(readings, all_namespaces)
            time.sleep(REFRESH_SECONDS)


def _here(namespace: str, name: str | None, everywhere: bool) -> Iterable[Reading]:
    """Yield readings of local jobs, whose workers' reports are current."""
    from elasticjob_cli.local.display import read_progress  # takes longer to load than the rest

    if name is not None:
        folders = [find_job(namespace, name)]
        folders[0].object()  # raises an error if it cannot be read
    else:
        folders = [one for one in list_jobs(None if everywhere else namespace) if one.running()]
    for folder in folders:
        if (document := _object(folder)) is not None:
            step = read_progress(folder.logs).get("step")
            yield Reading(document, time.monotonic(), step if isinstance(step, int) else None)


def _object(folder: JobFolder) -> Json | None:
    """Return a job's object; None if it cannot be read, which `get` reports."""
    try:
        return folder.object()
    except CommandError:
        return None


def _there(kubectl: Kubectl, name: str | None, everywhere: bool) -> Iterable[Reading]:
    for document in kubectl.jobs(name, everywhere):
        members = Cells(document).get(list, "status", "members")
        steps = [
            found
            for member in (members if isinstance(members, list) else ())
            if isinstance(found := Cells(member).get(int, "step"), int)
        ]
        yield Reading(document, time.monotonic(), max(steps, default=None))


def _is_running(document: Json) -> bool:
    ended = (Phase.SUCCEEDED, Phase.FAILED, Phase.SUSPENDED, Phase.INTERRUPTED)
    return Cells(document).text("status", "phase") not in ended


def _print(
    readings: list[tuple[Reading, float | None]], namespaced: bool, output: Output | None = None
) -> None:
    match output:
        case Output.JSON:
            show_text(as_json([_values(one, rate) for one, rate in readings]))
        case Output.YAML:
            show_text(as_yaml([_values(one, rate) for one, rate in readings]))
        case Output.NAME:
            show(*(f"elasticjob.elasticjob.dev/{one.key[1]}" for one, _ in readings))
        case _ if readings:
            titles = (("NAMESPACE",) if namespaced else ()) + COLUMNS
            rows = [_cells(one, rate, namespaced) for one, rate in readings]
            show(*aligned([titles, *rows], None if output else terminal_width()))
        case _:
            show("No job is running.", err=terminal_width() is None)


def _cells(one: Reading, rate: float | None, namespaced: bool) -> tuple[str, ...]:
    job = Cells(one.document)
    return (
        *((one.key[0],) if namespaced else ()),
        one.key[1],
        job.text("status", "phase"),
        f"{job.number('status', 'nodes')}/{job.number('status', 'wantedNodes')}",
        job.number("status", "rendezvous", "worldSize"),
        NONE if one.step is None else str(one.step),
        NONE if rate is None else f"{rate:.3g}",
        job.number("status", "rendezvous", "round", absent=NONE),
        job.number("status", "rounds", -1, "recoveryMs", absent=NONE),
        job.number("status", "snapshots", "goodputPercent", absent=NONE),
    )


def _values(one: Reading, rate: float | None) -> Json:
    """Return a reading for programs; unknown values are null."""
    job = Cells(one.document)
    values = {
        "namespace": one.key[0],
        "name": one.key[1],
        "phase": job.get(str, "status", "phase"),
        "nodes": job.get(int, "status", "nodes"),
        "wantedNodes": job.get(int, "status", "wantedNodes"),
        "workers": job.get(int, "status", "rendezvous", "worldSize"),
        "step": one.step,
        "stepsPerSecond": rate,
        "round": job.get(int, "status", "rendezvous", "round"),
        "recoveryMs": job.get(int, "status", "rounds", -1, "recoveryMs"),
        "goodputPercent": job.get(int, "status", "snapshots", "goodputPercent"),
    }
    return {name: None if value == INVALID else value for name, value in values.items()}
