"""Tables of `get` and `describe`, with the same columns as kubectl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from elasticjob_operator.domain.status.failures import latest_failure
from elasticjob_operator.model import ElasticJob
from elasticjob_operator.model.status import (
    FailureStatus,
    Interruptions,
    MemberStatus,
    PodCounts,
    RoundStatus,
)
from elasticjob_rendezvous.protocol.text import one_cell

COLUMNS = ("NAME", "PHASE", "RENDEZVOUS", "ROUND", "NODES", "WANTED", "RESTARTS", "AGE")
WIDE = ("MIN", "MAX", "MASTER", "CAUSE", "FAILURE", "LOSSES", "PREEMPTIONS", "RECOVERY MS")
NONE = "<none>"


def age(since: datetime | None, now: datetime) -> str:
    """Format an age as kubectl does: 45s, 3m20s, 5h12m, 3d."""
    if since is None:
        return NONE
    seconds = max(0, int((now - since).total_seconds()))
    if seconds < 120:
        return f"{seconds}s"
    if seconds < 3600:
        minutes, rest = divmod(seconds, 60)
        return f"{minutes}m{rest}s" if rest and minutes < 10 else f"{minutes}m"
    if seconds < 48 * 3600:
        hours, rest = divmod(seconds // 60, 60)
        return f"{hours}h{rest}m" if rest and hours < 8 else f"{hours}h"
    return f"{seconds // 86400}d"


def created(job: ElasticJob) -> datetime | None:
    """Return the creation time, which is in an undeclared field of the metadata."""
    stamp = (job.metadata.model_extra or {}).get("creationTimestamp")
    return datetime.fromisoformat(stamp) if isinstance(stamp, str) else job.status.start_time


def row(job: ElasticJob, wide: bool, now: datetime) -> tuple[str, ...]:
    """Return the cells of one job."""
    status, rendezvous = job.status, job.status.rendezvous
    cells = [
        job.metadata.name,
        str(status.phase or NONE),
        str(rendezvous.state if rendezvous else NONE),
        str(rendezvous.round if rendezvous else NONE),
        str(status.nodes),
        str(status.wanted_nodes),
        str(status.restarts),
        age(created(job), now),
    ]
    if wide:
        cause = rendezvous.cause.kind if rendezvous and rendezvous.cause else NONE
        latest = latest_failure(status)
        failure = latest.class_ if latest else NONE
        master = rendezvous.master if rendezvous and rendezvous.master else NONE
        cells += [str(job.spec.min_nodes), str(job.spec.max_nodes), master, cause, failure]
        counts = status.interruptions
        cells += [str(counts.losses), str(counts.preemptions)] if counts else [NONE, NONE]
        spent = status.rounds[-1].recovery_ms if status.rounds else None
        cells.append(NONE if spent is None else str(spent))
    return tuple(cells)


def header(wide: bool) -> tuple[str, ...]:
    return COLUMNS + (WIDE if wide else ())


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines, each column as wide as its widest cell.

    A cell has one line of printable characters, whatever a name in it contains.
    """
    rows = [tuple(map(one_cell, cells)) for cells in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "   ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in rows
    ]


def job_list(items: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return several objects as the List that kubectl prints in JSON and YAML."""
    return {"apiVersion": "v1", "kind": "List", "items": list(items)}


TIMES = {
    "detectMs": "DETECT ms",
    "stopMs": "STOP ms",
    "backoffMs": "BACKOFF ms",
    "joinMs": "JOIN ms",
    "confirmMs": "CONFIRM ms",
    "startMs": "START ms",
    "firstStepMs": "FIRST STEP ms",
}
ROUND_COLUMNS = ("ROUND", "CAUSE", "NODES", *TIMES.values(), "COLD")


def round_lines(rounds: Sequence[RoundStatus]) -> list[str]:
    """Format the status' rounds with causes and milliseconds."""
    rows: list[tuple[str, ...]] = [ROUND_COLUMNS]
    for item in rounds:
        times = item.model_dump(by_alias=True)
        rows.append((str(item.round), _cause(times), str(item.nodes), *_times(times)))
    return aligned(rows)


def _cell(value: int | None) -> str:
    return NONE if value is None else str(value)


def _start(member: MemberStatus) -> str:
    """Format a member's start as `warm` or `cold: the command changed`."""
    return ": ".join(part for part in (member.start, member.cold_reason) if part) or NONE


def history_lines(rounds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format every round of a run with its cause and its time since the start."""
    rows: list[tuple[str, ...]] = [("AFTER", *ROUND_COLUMNS)]
    for item in rounds:
        after = f"{item['finalSeconds']:.1f} s"
        rows.append((after, str(item["round"]), _cause(item), str(item["nodes"]), *_times(item)))
    return aligned(rows)


def _cause(item: Mapping[str, Any]) -> str:
    """Format a cause as `leave: digits-1`."""
    return ": ".join([item["cause"], *([", ".join(item["members"])] if item["members"] else [])])


def _times(item: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the times and the number of cold nodes; files of older releases lack some."""
    keys = (*TIMES, "coldNodes")
    return tuple("-" if item.get(key) is None else str(item[key]) for key in keys)


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
    said = [f"{number} {one if number == 1 else many}" for number, one, many in named if number]
    return ", ".join(said) or "none"


def _pods_text(counts: PodCounts) -> str:
    """Format the pods by state: `3 (2 ready, 1 pending), 1 terminating`."""
    states = [("ready", counts.ready), ("pending", counts.pending)]
    shown = ", ".join(f"{number} {state}" for state, number in states if number)
    text = f"{counts.active} ({shown})" if shown else str(counts.active)
    others = [("terminating", counts.terminating), ("failed", counts.failed)]
    return ", ".join([text, *(f"{number} {state}" for state, number in others if number)])


def restarts_text(job: ElasticJob) -> str:
    """Format the charged failures of `status.restarts`: `1 of 3`."""
    most, charged = job.spec.max_restarts, job.status.restarts
    return f"{charged} of {most}" if charged <= most else f"{charged}, maxRestarts is {most}"


def description(job: ElasticJob, logs: str, running: bool, explanation: Sequence[str]) -> list[str]:
    """Return the lines of `describe` for a job."""
    spec, status = job.spec, job.status
    now = datetime.now(UTC)
    lines = [
        f"Name:       {job.metadata.name}",
        f"Namespace:  {job.metadata.namespace}",
        f"Where:      this machine, {'running' if running else 'not running'}",
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
        lines += ["Members:", *("  " + line for line in aligned(rows))]
    if status.rounds:
        title = "Rounds (times in milliseconds):"
        lines += [title, *("  " + line for line in round_lines(status.rounds))]
    if first := status.first_failure:
        lines += ["First failure:", *("  " + line for line in failure_lines(first))]
    if (latest := latest_failure(status)) and latest != first:
        lines += ["Last failure:", *("  " + line for line in failure_lines(latest))]
    if status.conditions:
        rows4 = [("TYPE", "STATUS", "REASON", "MESSAGE")]
        rows4 += [(str(c.type), str(c.status), c.reason, c.message) for c in status.conditions]
        lines += ["Conditions:", *("  " + line for line in aligned(rows4))]
    return lines
