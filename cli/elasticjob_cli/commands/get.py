"""Commands `get` and `rounds`: tables of this machine's or of a cluster's jobs.

Both read documents without the API's models, so that a listing takes no longer than its program
takes to load, and a job of another release or with a damaged status is listed beside the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from elasticjob_cli.commands.options import (
    Name,
    Output,
    Place,
    as_json,
    as_yaml,
    placed,
    until_interrupted,
)
from elasticjob_cli.commands.tables import (
    INVALID,
    NONE,
    Cells,
    aligned,
    header,
    history_lines,
    job_list,
    round_lines,
    row,
    unreadable_row,
)
from elasticjob_cli.errors import BadInput, CommandError, ExitCode
from elasticjob_cli.kubectl import Kubectl
from elasticjob_cli.local.job_store import RUNNER_GONE, JobFolder, find_job, list_jobs
from elasticjob_cli.output import show, show_text, terminal_width
from elasticjob_operator.enums import ConditionStatus, ConditionType, Phase

Json = dict[str, Any]
POLL_SECONDS = 0.2
CLUSTER_POLL_SECONDS = 2.0
OF_TABLES = (None, Output.WIDE)
"""Outputs with a table, and notes beside it."""


@placed
def get(
    place: Place,
    name: Annotated[
        str | None, typer.Argument(help="Name of a job. Default: all jobs.", metavar="NAME")
    ] = None,
    output: Annotated[Output | None, typer.Option("--output", "-o", help="Output format.")] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch",
            "-w",
            help="Print each change until the jobs end, on a cluster until Ctrl-C.",
        ),
    ] = False,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")
    ] = False,
) -> None:
    """List jobs of this machine or of a cluster, running or ended.

    At a terminal long names are shortened to its width; -o wide shows everything. The exit code is
    1 if a job was damaged; its row and a message name the damage, and the others are listed.

    \b
    Examples:
      elasticjob get
      elasticjob get digits -o yaml
      elasticjob get digits -w
      elasticjob get --context prod -A
    """
    if name is not None and all_namespaces:
        raise BadInput("--all-namespaces must come without a name")
    table = JobTable(output, all_namespaces, single=name is not None)
    if place.kubectl is not None:
        _get_there(place.kubectl, name, watch, table)
    else:
        _get_here(place.namespace, name, watch, table)
    if table.damaged:
        raise typer.Exit(int(ExitCode.FAILED))


class JobTable:
    """Printer of jobs in one output format; `damaged` is True once a job could not be read."""

    def __init__(self, output: Output | None, namespaced: bool, single: bool) -> None:
        self.output = output
        self.damaged = False
        self.namespaced = namespaced
        self._single = single
        self._wide = output is Output.WIDE

    def cells(self, document: Json) -> tuple[str, ...]:
        return row(document, True, datetime.now(UTC), self.namespaced)

    def differ(self, before: Json, now: Json) -> bool:
        """Return True if a change is visible; ages are not compared."""
        at = header(True, self.namespaced).index("AGE")
        was, is_now = self.cells(before), self.cells(now)
        return (*was[:at], *was[at + 1 :]) != (*is_now[:at], *is_now[at + 1 :])

    def show_all(self, objects: Sequence[Json], unreadable: Sequence[JobFolder] = ()) -> None:
        if self.output not in OF_TABLES:
            self.show_documents(objects)
            return
        shown = len(header(self._wide, self.namespaced))
        rows = [self.cells(item)[:shown] for item in objects]
        for folder in unreadable:
            rows.append(unreadable_row(folder.namespace, folder.name, self._wide, self.namespaced))
        titles = header(self._wide, self.namespaced)
        rows = sorted(rows, key=lambda cells: cells[: titles.index("NAME") + 1])
        show(*aligned([titles, *rows], None if self._wide else terminal_width()))

    def show_change(self, document: Json) -> None:
        """Print a job that has changed, without the titles."""
        if self.output not in OF_TABLES:
            self.show_documents([document], single=True)
            return
        titles = header(self._wide, self.namespaced)
        rows = [titles, self.cells(document)[: len(titles)]]
        show(*aligned(rows, None if self._wide else terminal_width())[1:])

    def show_documents(self, objects: Sequence[Json], single: bool = False) -> None:
        document = objects[0] if single or (self._single and objects) else job_list(objects)
        match self.output:
            case Output.JSON:
                show_text(as_json(document))
            case Output.YAML:
                show_text(as_yaml(document))
            case _:
                for item in objects:
                    show(f"elasticjob.elasticjob.dev/{_name(item)}")

    def check(self, objects: Sequence[Json]) -> None:
        """Report each job that has an invalid cell, with the field and its remedy."""
        for item in objects:
            if INVALID in self.cells(item):
                self.damaged = True
                show(f"job {_name(item)}: {_fault(item)}", err=True)


def _name(document: Json) -> str:
    return Cells(document).text("metadata", "name")


def _key(document: Json) -> tuple[str, str]:
    return Cells(document).text("metadata", "namespace"), _name(document)


def _fault(document: Json) -> str:
    """Return the first fault of a document that has one."""
    from elasticjob_cli.commands.cluster_reader import parsed  # takes longer to load than a listing
    from elasticjob_operator.model import Problem

    ignored: list[Problem] = []
    try:
        parsed(document, ignored)
    except CommandError as error:
        return str(error)
    if ignored:
        return f"its status was damaged, or written by another release: {ignored[0]}"
    return "a field of its status has another type than in this release"


def _get_here(namespace: str, name: str | None, watch: bool, table: JobTable) -> None:
    everywhere = table.namespaced
    folders = (
        list_jobs(None if everywhere else namespace)
        if name is None
        else [find_job(namespace, name)]
    )
    running = {folder: folder.running() for folder in folders}  # before the read, see `explain`
    found, errors = _read(folders)
    table.damaged = bool(errors)
    if not folders and table.output in OF_TABLES:
        show("No local jobs: start one with `elasticjob run job.yaml`.", err=True)
        return
    if name is None or found:
        table.show_all(list(found.values()), list(errors))
    for error in errors.values():
        show_text(f"elasticjob: {error}", err=True)
    table.check(list(found.values()))
    if table.output in OF_TABLES:
        for folder, item in found.items():
            if note := _note(item, running[folder]):
                show(f"{_name(item)}: {note}", err=True)
    if watch:
        with until_interrupted():
            _watch_here(found, table)


def _read(folders: list[JobFolder]) -> tuple[dict[JobFolder, Json], dict[JobFolder, CommandError]]:
    """Return the readable objects by folder, and the errors of the others."""
    found: dict[JobFolder, Json] = {}
    errors: dict[JobFolder, CommandError] = {}
    for folder in folders:
        try:
            found[folder] = folder.object()
        except CommandError as error:
            errors[folder] = error
    return found, errors


def _note(document: Json, running: bool) -> str:
    """Return a note on a job whose runner is gone, or that has lost its store; else nothing."""
    phase = Cells(document).text("status", "phase")
    if phase == Phase.INTERRUPTED or (phase == NONE and not running):
        return RUNNER_GONE
    return _trouble(document)


def _trouble(document: Json) -> str:
    """Return the message that the rendezvous store cannot be used; empty otherwise."""
    conditions = Cells(document).get(list, "status", "conditions")
    for condition in conditions if isinstance(conditions, list) else ():
        cells = Cells(condition)
        if cells.text("type") == ConditionType.RENDEZVOUS_UNAVAILABLE:
            is_true = cells.text("status") == ConditionStatus.TRUE
            return cells.text("message") if is_true else ""
    return ""


def _recovery(document: Json) -> str:
    """Return the message that the rendezvous store can be used again; empty without one."""
    from elasticjob_cli.commands.cluster_reader import parsed  # takes longer to load than a listing
    from elasticjob_operator.domain.status.store_condition import recovered_text

    try:
        return recovered_text(parsed(document).status)
    except CommandError:
        return ""


def _watch_here(found: dict[JobFolder, Json], table: JobTable) -> None:
    shown, folders = dict(found), list(found)
    while folders:
        time.sleep(POLL_SECONDS)
        # Checked before the read, so that a runner's last write is not missed.
        running = [folder for folder in folders if folder.running()]
        for folder in folders:
            if folder.exists() and (now := folder.object()) != shown[folder]:
                before, shown[folder] = shown[folder], now
                if table.output not in OF_TABLES or table.differ(before, now):
                    table.show_change(now)
                known, trouble = _trouble(before), _trouble(now)
                changed = table.output in OF_TABLES and trouble != known
                if changed and (note := trouble or _recovery(now)):
                    show(f"{_name(now)}: {note}", err=True)
        folders = running


def _get_there(there: Kubectl, name: str | None, watch: bool, table: JobTable) -> None:
    """Print the jobs of a cluster; with `watch` each change, until interrupted."""
    everywhere = table.namespaced
    objects = there.jobs(name, everywhere)
    if not objects and table.output in OF_TABLES:
        where = "on the cluster" if everywhere else "in this namespace of the cluster"
        show(f"No jobs {where}.", err=True)
    else:
        table.show_all(objects)
        table.check(objects)
    known = {_key(object_): object_ for object_ in objects}
    with until_interrupted():
        while watch:
            time.sleep(CLUSTER_POLL_SECONDS)
            for job in there.jobs(name, everywhere):
                before = known.get(_key(job))
                known[_key(job)] = job
                if before is None or table.differ(before, job):
                    table.show_change(job)


@placed
def rounds(
    place: Place,
    name: Name,
    output: Annotated[
        Output | None,
        typer.Option("--output", "-o", help="Output format; wide has the phases of each recovery."),
    ] = None,
) -> None:
    """List the rounds of a job with their causes and times.

    A cluster keeps the latest rounds, this machine all of a run.

    \b
    Examples:
      elasticjob rounds digits
      elasticjob rounds digits -o wide
      kubectl elasticjob rounds digits -n team-a
    """
    if place.kubectl is not None:
        found = Cells(place.kubectl.jobs(name)[0]).get(list, "status", "rounds") or []
    else:
        found = find_job(place.namespace, name).rounds()
    found = [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
    match output:
        case Output.JSON:
            show_text(as_json(found))
        case Output.YAML:
            show_text(as_yaml(found))
        case Output.NAME:
            show(*(str(item.get("round")) for item in found))
        case _ if not found:
            show(f'job "{name}" has had no round yet: `explain` states the reason', err=True)
        case _:
            lines = round_lines if place.kubectl is not None else history_lines
            show(*lines(found, output is Output.WIDE, terminal_width()))
