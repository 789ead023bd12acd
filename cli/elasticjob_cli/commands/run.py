"""Command `elasticjob run`: runs a manifest's job on this machine to its end."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from elasticjob_cli import settings
from elasticjob_cli.commands.describe import failure_lines, restarts_text
from elasticjob_cli.commands.script_job import (
    Nodes,
    Target,
    command_of,
    job_document,
    job_name,
    parse_nodes,
    validated,
)
from elasticjob_cli.commands.tables import history_lines, wrapped
from elasticjob_cli.errors import BadInput, ExitCode
from elasticjob_cli.local import display
from elasticjob_cli.local.container import Trainer, interpreter, trainer, with_nested_launch
from elasticjob_cli.local.differences import check_accelerators, ignored_parts
from elasticjob_cli.local.display import LiveView, PlainView, View
from elasticjob_cli.local.job_store import DEFAULT_NAMESPACE, JobFolder
from elasticjob_cli.local.logs import command_logs, find_worker, last_line, worker_logs
from elasticjob_cli.local.stored_job import RunOutcome
from elasticjob_cli.manifest_job import folder_of, manifest_job
from elasticjob_cli.output import final_summary, show, show_text, terminal_width
from elasticjob_cli.usage_errors import TARGET, TargetCommand
from elasticjob_operator.domain.explain.phrases import stop_report
from elasticjob_operator.domain.plan.sizes import wanted_size
from elasticjob_operator.domain.status.failures import latest_failure
from elasticjob_operator.model import ElasticJob, Launch, Phase
from elasticjob_operator.model.manifest import STANDARD_INPUT, shown
from elasticjob_operator.model.types import INT32_MAX
from elasticjob_rendezvous.protocol.text import bounded, counted, echoed, one_line

COMMAND_CLASS = TargetCommand


def _nodes(text: str) -> Nodes:
    try:
        return parse_nodes(text, least_of_all=0)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _workers(text: str) -> int | str:
    """Return a number of workers, or the word by which the launcher counts them."""
    if text in ("auto", "gpu", "cpu"):
        return text
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0 and len(text) < 9):
        raise typer.BadParameter(f"must be a number, auto, gpu or cpu, not {echoed(text)}")
    return int(text)


def run(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="Script and its arguments, manifest with one ElasticJob (- is standard input), or "
            "after -- any command.",
            metavar="SCRIPT|MANIFEST [ARG]",
            show_default=False,
        ),
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--filename", "-f", metavar="FILE", help="Manifest of any name.", show_default=False
        ),
    ] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")
    ] = False,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the job instead of the manifest's or the script's."),
    ] = None,
    nodes: Annotated[
        Any,
        typer.Option(
            "--nodes", parser=_nodes, metavar="N|MIN:MAX", show_default=False,
            help="Number of nodes, or of a script its minimum and maximum. A script has one by "
            "default; a manifest's job starts with N.",
        ),
    ] = None,
    nproc_per_node: Annotated[
        Any,
        typer.Option(
            "--nproc-per-node", "--nproc_per_node", parser=_workers, metavar="N|auto|gpu|cpu",
            help="Workers of each node. Default: the manifest's; of a script one for each "
            "accelerator, or 1.", show_default=False,
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            "--max-restarts", "--max_restarts", min=0, max=INT32_MAX, metavar="N",
            help="Failures of workers after which the job fails; lost nodes do not count. Default: "
            "the manifest's; of a script 3.", show_default=False,
        ),
    ] = None,
    launch: Annotated[
        Launch | None,
        typer.Option(
            "--launch", show_default=False,
            help="Run the command once for each worker (PerWorker), or once for each node, where "
            "it starts the workers itself (PerNode). Default: the manifest's; of a script Auto, "
            "which decides by the command.",
        ),
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print lines instead of a live table.")
    ] = False,
    console_logs: Annotated[
        bool, typer.Option("--logs", help="Also print the workers' output.")
    ] = False,
    python: Annotated[
        str | None,
        typer.Option(
            "--python",
            metavar="PROGRAM",
            help="Path or name of the interpreter that replaces `python` in the job. Default: the "
            "active virtual environment's, else the one that runs elasticjob.",
            show_default=False,
        ),
    ] = None,
) -> None:  # fmt: skip
    """Run a script, a command or a manifest's job on this machine, with processes as pods.

    Options stand before SCRIPT or directly after it; from the first word that is none of them, the
    words belong to the script. A local run never touches a cluster.

    Ctrl-C stops the job after a checkpoint, if its script saves on request, and reports the
    part that was not saved; a second Ctrl-C kills it. The exit code is 0 if the job
    succeeded, 1 if it failed, 2 for bad input, 130 if it was interrupted. The job's command runs
    in the manifest's folder, or in the current one without a manifest or if it comes from standard
    input or a pipe.

    \b
    Examples:
      elasticjob run train.py --nodes 2:4 --epochs 3
      elasticjob run --nproc-per-node 2 -- python3 -m package.train
      elasticjob run job.yaml
      elasticjob run job.yaml --plain --logs
      elasticjob run job.yaml --name second --nodes 1
      kubectl get elasticjob digits -o yaml | elasticjob run -
    """
    kind = context.meta[TARGET]
    if file is not None:
        if words:
            raise BadInput(f"-f {shown(file)} must come without {echoed(words[0])}")
        kind, words = Target.MANIFEST, [file]
    if not words:
        raise BadInput(
            "a script, a manifest or -- and a command must be given, such as "
            "`elasticjob run train.py`, `elasticjob run -f job.yaml` or `elasticjob run -- ./train`"
        )
    chosen = Choice(name, nodes, nproc_per_node, python, max_restarts, launch)
    if kind is Target.MANIFEST:
        if len(words) > 1:
            raise BadInput(
                f"{shown(words[0])} is taken for a manifest, which has no arguments: "
                f"{echoed(words[1])}; to run a command, put -- before it"
            )
        file = words[0]
        job, container = prepare(file, chosen)
    else:
        file = None
        job, container = prepare_command(kind, words, chosen)
    console = display.console()
    live = console.is_terminal and not console.is_dumb_terminal and not plain
    view: View = LiveView(console) if live else PlainView(console)
    try:
        ended = asyncio.run(execute(job, container, view, file, console_logs))
    except KeyboardInterrupt:  # before the run could handle it as a drain request
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None
    finally:
        view.close()
    with final_summary():
        print_outcome(ended)
    raise typer.Exit(int(ended.exit_code))


@dataclass(frozen=True, slots=True)
class Choice:
    """Options that replace fields of a job; None for an option that was not given."""

    name: str | None = None
    nodes: Nodes | None = None
    workers: int | str | None = None
    python: str | None = None
    max_restarts: int | None = None
    launch: Launch | None = None


def prepare(file: str, chosen: Choice) -> tuple[ElasticJob, Trainer]:
    """Return a manifest's job and its trainer container on this machine; raises `BadInput`."""
    job, remarks = manifest_job(file, _program_hint(file))
    for remark in remarks:
        show_text(remark, err=True)
    if chosen.name is not None:
        job = renamed(job, chosen.name)
    changed: dict[str, Any] = {}
    if chosen.nodes is not None:
        if chosen.nodes.least != chosen.nodes.most:
            raise BadInput(
                "--nodes must be one number for a manifest: its minNodes and maxNodes are the range"
            )
        changed["nodes"] = chosen.nodes.most
    if chosen.workers is not None:
        changed["nproc_per_node"] = chosen.workers
    if chosen.max_restarts is not None:
        changed["max_restarts"] = chosen.max_restarts
    if chosen.launch is not None:
        changed["launch"] = chosen.launch
    if changed:
        job = job.model_copy(update={"spec": job.spec.model_copy(update=changed)})
    asked = changed.get("nodes")
    if asked is not None and (wanted := wanted_size(job).nodes) != asked:
        show(
            f"{asked} is not a legal size of this job; starting {counted(wanted, 'node')}", err=True
        )
    if parts := ignored_parts(job):
        show(f"a local run ignores: {', '.join(parts)}", err=True)
    return _with_trainer(job, folder_of(file), chosen, f"{shown(file)}: ")


def _program_hint(file: str) -> str:
    """Return a remedy if the file is a program and not a manifest."""
    if file == STANDARD_INPUT or not os.access(file, os.X_OK):
        return ""
    program = bounded(file if "/" in file else f"./{file}")
    return f"\n{shown(file)} is a program: `elasticjob run -- {program}` runs it"


def prepare_command(
    kind: Target, words: Sequence[str], chosen: Choice
) -> tuple[ElasticJob, Trainer]:
    """Return the job of a script or command and its trainer container; raises `BadInput`."""
    nodes = chosen.nodes or Nodes(1, 1)
    if not nodes.least:
        raise BadInput("--nodes must be at least 1")
    document = job_document(job_name(kind, words), command_of(kind, words), nodes, chosen.workers)
    if chosen.max_restarts is not None:
        document["spec"]["maxRestarts"] = chosen.max_restarts
    if chosen.launch is not None:
        document["spec"]["launch"] = chosen.launch.value
    job = validated(document)
    if chosen.name is not None:
        job = renamed(job, chosen.name)
    return _with_trainer(job, Path.cwd(), chosen)


def _with_trainer(
    job: ElasticJob, base: Path, chosen: Choice, where: str = ""
) -> tuple[ElasticJob, Trainer]:
    """Return the job as this machine starts it, and its trainer container; raises `BadInput`."""
    python = None if chosen.python is None else interpreter(chosen.python)
    environment = settings.container_environment(python)
    for remark in check_accelerators(job, environment, isinstance(chosen.workers, int)):
        show(remark, err=True)
    job = with_nested_launch(job, base, environment)
    container = trainer(job, base, environment, sys.executable, python)
    if container.unresolved:
        listed = ", ".join(container.unresolved)
        raise BadInput(
            f"{where}valueFrom can only be resolved on a cluster: {listed}; "
            "set them in the environment of `elasticjob run`"
        )
    return job, container


def renamed(job: ElasticJob, name: str) -> ElasticJob:
    """Return the job under another name; raises `BadInput` if the name is invalid."""
    document = job.manifest()
    document["metadata"]["name"] = name
    try:
        return ElasticJob.model_validate(document)
    except ValueError as error:
        raise BadInput(
            "--name must be a DNS label of at most 55 characters: lower-case letters, digits and "
            f"'-', a letter first, no '-' last; got {echoed(name)}"
        ) from error


async def execute(
    job: ElasticJob, container: Trainer, view: View, file: str | None, console_logs: bool
) -> RunOutcome:
    """Run the job; raises `CommandError` if the local cluster fails."""
    # Imported here: it takes as long to load as everything else, and other commands do not need it.
    from elasticjob_cli.local.run import LocalRun

    if file is None:
        manifest = shlex.join(container.argv)
    else:
        manifest = shown(file) if file == STANDARD_INPUT else str(Path(file).resolve())
    return await LocalRun(job, container, view, manifest, console_logs).run()


def print_outcome(ended: RunOutcome) -> None:
    """Print the rounds with causes and times, and the latest failure of a failed job."""
    status = ended.job.status
    for line in history_lines(ended.rounds, width=terminal_width()):
        show(line)
    if ended.exit_code is ExitCode.FAILED:
        reasons = [c for c in status.conditions if c.type == "Failed" and c.status == "True"]
        for condition in reasons:
            _say(f"failed: {condition.reason}: {condition.message}", err=True)
        if failure := latest_failure(status):
            for line in failure_lines(failure):
                show(f"  {line}", err=True)
    metadata = ended.job.metadata
    name = metadata.name
    report = stop_report(status.last_stop)
    if report is not None:
        _say(f"{name}: {report.text}", err=not report.complete)
    if metadata.deletion_timestamp is not None:
        _say(f"{name}: deleted after {ended.seconds:.1f} s, with its status and logs")
        return
    if status.phase is Phase.SUCCEEDED:
        for line in without_step(ended):
            _say(line)
    there = "" if metadata.namespace == DEFAULT_NAMESPACE else f" -n {metadata.namespace}"
    _say(
        f"{name}: {status.phase} after {ended.seconds:.1f} s, restarts {restarts_text(ended.job)}; "
        f"`elasticjob describe {name}{there}` and `elasticjob logs {name}{there}` show more"
    )


def _say(text: str, err: bool = False) -> None:
    """Print a text, at a terminal as lines that fit it."""
    show(*wrapped(one_line(text), terminal_width()), err=err)


DONE = "if its checkpoint says that all is done, remove that to begin again"


def without_step(ended: RunOutcome) -> list[str]:
    """Return the last output of rank 0, or of its pod's command, if no worker reported a step, such
    as of a finished job."""
    metadata = ended.job.metadata
    folder = JobFolder(metadata.namespace, metadata.name)
    if not ended.rounds or display.read_progress(folder.logs):
        return []
    worker = find_worker(ended.rounds, 0, None)
    if last := last_line(*worker_logs(folder.logs, worker)):
        rest = f"; the output of rank 0 ends{last}"
    elif last := last_line(*command_logs(folder.logs, worker["pod"])):
        rest = f"; the output of {worker['pod']} ends{last}"
    elif ended.has_lost_files:
        rest = ", and its files and logs could not be written"
    else:
        rest = f" and rank 0 printed nothing; {DONE}"
    return [f"{metadata.name}: no worker reported a training step{rest}"]
