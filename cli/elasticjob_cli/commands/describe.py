"""Command `elasticjob describe`: all details of one job, here or on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer

from elasticjob_cli.commands.cluster_reader import ClusterReader
from elasticjob_cli.commands.explain import local_explanation
from elasticjob_cli.commands.options import Name, Output, Place, placed
from elasticjob_cli.commands.tables import NONE, age, aligned, round_lines, wrapped
from elasticjob_cli.errors import BadInput
from elasticjob_cli.local.job_store import find_job
from elasticjob_cli.local.stored_job import read_job
from elasticjob_cli.output import show, terminal_width
from elasticjob_operator.domain.status.failures import latest_failure
from elasticjob_operator.domain.status.snapshots import lost_text, size_text
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.status import (
    FailureStatus,
    Interruptions,
    MemberStatus,
    PodCounts,
    SnapshotsStatus,
)
from elasticjob_rendezvous.protocol.text import one_line


@placed
def describe(
    place: Place,
    name: Name,
    output: Annotated[
        Output | None,
        typer.Option("--output", "-o", help="wide: the phases of each recovery, nothing cut."),
    ] = None,
) -> None:
    """Show all details of one job.

    Members, rounds with their causes and times, the first failure, and conditions.

    \b
    Examples:
      elasticjob describe digits
      elasticjob describe digits -o wide
    """
    if output not in (None, Output.WIDE):
        raise BadInput(f"describe prints text: use `elasticjob get {name} -o {output}`")
    wide = output is Output.WIDE
    width = None if wide else terminal_width()
    if place.kubectl is not None:
        found, explained = ClusterReader.of(place.kubectl).described(name)
        logs = "`kubectl elasticjob logs`"
        lines = description(found, "a cluster", logs, explained.sentences, wide, width)
        lines += (
            ["Events:", *(f"  {event}" for event in explained.events)] if explained.events else []
        )
    else:
        folder = find_job(place.namespace, name)
        running = folder.running()  # before the read, so that a runner's last write is not missed
        found = read_job(folder)
        where = f"this machine, {'running' if running else 'not running'}"
        sentences = local_explanation(found, running)
        lines = description(found, where, str(folder.logs), sentences, wide, width)
    for line in lines:
        show(*wrapped(one_line(line), width, indent=4))


def _cell(value: int | None) -> str:
    return NONE if value is None else str(value)


def _start(member: MemberStatus) -> str:
    """Format a member's start as `warm` or `cold: the command changed`."""
    return ": ".join(part for part in (member.start, member.cold_reason) if part) or NONE


def failure_lines(failure: FailureStatus) -> list[str]:
    """Format a failure: rank and pod, exit code or signal, message and traceback."""
    how = f"exit code {failure.exit_code}, " if failure.exit_code is not None else ""
    how = f"signal {failure.signal}, " if failure.signal else how
    rank = "" if failure.rank is None else f"rank {failure.rank} on "
    lines = [f"{rank}{failure.pod}, round {failure.round}: {how}{failure.class_}"]
    lines += failure.message.splitlines()
    return lines + failure.traceback.rstrip().splitlines()


def interruption_line(counts: Interruptions) -> str:
    """Format the interruptions not charged as restarts: `2 losses, 1 preemption`."""
    named = [
        (counts.losses, "loss", "losses"),
        (counts.leaves, "leave", "leaves"),
        (counts.preemptions, "preemption", "preemptions"),
        (counts.joins, "join", "joins"),
        (counts.others, "other", "others"),
    ]
    parts = [f"{number} {one if number == 1 else many}" for number, one, many in named if number]
    return ", ".join(parts) or "none"


def _pods_text(counts: PodCounts) -> str:
    """Format the pods by state: `3 (2 ready, 1 pending), 1 terminating`."""
    states = [("ready", counts.ready), ("pending", counts.pending)]
    shown = ", ".join(f"{number} {state}" for state, number in states if number)
    text = f"{counts.active} ({shown})" if shown else str(counts.active)
    others = [("terminating", counts.terminating), ("failed", counts.failed)]
    return ", ".join([text, *(f"{number} {state}" for state, number in others if number)])


def snapshot_lines(found: SnapshotsStatus) -> list[str]:
    """Format the snapshots: steps, memory, losses and goodput."""
    goodput = "" if found.goodput_percent is None else f", goodput {found.goodput_percent} %"
    return [
        f"Restorable step: {_cell(found.restorable_step)} (in storage "
        f"{_cell(found.stored_step)}, on other nodes {_cell(found.replicated_step)})",
        f"Replicas: {found.replicas}",
        f"Memory: twice {size_text(found.bytes_per_node)} on each node",
        f"Since the start: {lost_text(found.lost_steps, found.lost_ms)}{goodput}",
    ]


def restarts_text(job: ElasticJob) -> str:
    """Format the charged failures of `status.restarts`: `1 of 3`. The last one has no restart."""
    most, charged = job.spec.max_restarts, job.status.restarts
    if charged == most + 1:
        return f"{most} of {most}, then one failure more"
    return f"{charged} of {most}" if charged <= most else f"{charged}, maxRestarts is {most}"


def created(job: ElasticJob) -> datetime | None:
    """Return the creation time, which is in an undeclared field of the metadata."""
    stamp = (job.metadata.model_extra or {}).get("creationTimestamp")
    return datetime.fromisoformat(stamp) if isinstance(stamp, str) else job.status.start_time


def description(
    job: ElasticJob,
    where: str,
    logs: str,
    explanation: Sequence[str],
    wide: bool = False,
    width: int | None = None,
) -> list[str]:
    """Return the lines of `describe` for a job; tables fit `width`."""
    inner = None if width is None or wide else width - 2
    spec, status = job.spec, job.status
    now = datetime.now(UTC)
    lines = [
        f"Name:       {job.metadata.name}",
        f"Namespace:  {job.metadata.namespace}",
        f"Where:      {where}",
        f"Age:        {age(created(job), now)}",
        f"Phase:      {status.phase or NONE}",
        f"Nodes:      {status.nodes}, wanted {status.wanted_nodes}, "
        f"allowed {spec.min_nodes} to {spec.max_nodes}"
        + (f" by {spec.node_increment}" if spec.node_increment > 1 else ""),
        f"Pods:       {_pods_text(status.pods or PodCounts())}",
        f"Restarts:   {restarts_text(job)}",
        *([f"Uncharged:  {interruption_line(counts)}"] if (counts := status.interruptions) else []),
        f"Logs:       {logs}",
    ]
    if explanation:
        lines += ["Explanation:", *(f"  {sentence}" for sentence in explanation)]
    if rendezvous := status.rendezvous:
        lines += [
            "Rendezvous:",
            f"  State:    {rendezvous.state}",
            f"  Round:    {rendezvous.round}",
            f"  Nodes:    {rendezvous.nodes}, {rendezvous.waiting} waiting"
            + (f" ({rendezvous.waiting_reason})" if rendezvous.waiting_reason else ""),
            f"  World:    {rendezvous.world_size}",
            f"  Master:   {rendezvous.master or NONE}",
        ]
    if status.members:
        rows = [("POD", "RANK", "STATE", "ROUND", "START", "STEP", "CHECKPOINT")]
        rows += [
            (item.pod, _cell(item.rank), item.state, str(item.round),
             _start(item), _cell(item.step), _cell(item.checkpoint_step))
            for item in status.members
        ]  # fmt: skip
        lines += ["Members:", *("  " + line for line in aligned(rows, inner))]
    if found := status.snapshots:
        lines += ["Snapshots:", *("  " + line for line in snapshot_lines(found))]
    if status.rounds:
        title = "Rounds (times in milliseconds):"
        shown = [item.model_dump(by_alias=True) for item in status.rounds]
        lines += [title, *("  " + line for line in round_lines(shown, wide, inner))]
    if first := status.first_failure:
        lines += ["First failure:", *("  " + line for line in failure_lines(first))]
    if (latest := latest_failure(status)) and latest != first:
        lines += ["Last failure:", *("  " + line for line in failure_lines(latest))]
    if status.conditions:
        rows4 = [("TYPE", "STATUS", "REASON", "MESSAGE")]
        rows4 += [(str(c.type), str(c.status), c.reason, c.message) for c in status.conditions]
        lines += ["Conditions:", *("  " + line for line in aligned(rows4))]
    return lines
