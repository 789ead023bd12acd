"""Display of `elasticjob run`: a live table at a terminal, plain lines elsewhere.

It shows snapshots of the job, gathered from its pods, its rendezvous and its logs. A full disk
or a closed pipe does not end the run.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Protocol, cast

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from elasticjob_agent.core.progress import WorkerProgress
from elasticjob_agent.worker_files import read_progress as read_progress_file
from elasticjob_cli.commands.tables import NARROWEST, aligned, clip
from elasticjob_cli.local.logs import WORKERS
from elasticjob_cli.local.screen import Screen
from elasticjob_cli.output import log_line
from elasticjob_operator.domain.observed.state import Observed, Pod
from elasticjob_operator.domain.status.store_condition import recovered_text, trouble_text
from elasticjob_operator.model import ElasticJob, Phase, RendezvousState
from elasticjob_operator.model.status import CauseStatus, Status
from elasticjob_rendezvous.protocol.records.members import MemberState
from elasticjob_rendezvous.protocol.store_health import CONSEQUENCE
from elasticjob_rendezvous.protocol.text import counted, one_line


def console() -> Console:
    """Return a console for standard output, a terminal or not."""
    return Console(file=None if sys.stdout is None else cast("IO[str]", Screen(sys.stdout)))


def is_gone(shown_on: Console) -> bool:
    """Return True if the console's output was closed by its reader."""
    screen = screen_of(shown_on)
    return screen is not None and screen.gone


def is_congested(shown_on: Console) -> bool:
    """Return True while the console's output waits for its terminal."""
    screen = screen_of(shown_on)
    return screen is not None and screen.congested


def screen_of(shown_on: Console) -> Screen | None:
    """Return the console's screen; None if it writes elsewhere."""
    return shown_on.file if isinstance(shown_on.file, Screen) else None


def drain(shown_on: Console) -> None:
    """Wait until the console's output is written."""
    if screen := screen_of(shown_on):
        screen.drain()


@dataclass(frozen=True, slots=True)
class NodeRow:
    """Row of one pod in the table of nodes."""

    pod: str
    ranks: str
    state: str
    round: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Displayed state of a job at one moment."""

    job: ElasticJob
    elapsed_seconds: float
    nodes: tuple[NodeRow, ...] = ()
    progress: Mapping[str, object] = field(default_factory=dict)


def node_rows(observed: Observed, ranks: Mapping[str, str]) -> tuple[NodeRow, ...]:
    """Return a row per pod in order of index; `ranks` are those of the current round."""
    members = {member.name: member for member in observed.rendezvous.members}
    rows = []
    for pod in sorted(observed.pods, key=lambda pod: (pod.index, pod.created_at)):
        member = members.get(pod.name) if pod.active else None
        if member is not None:
            state = member.state.value
            rows.append(NodeRow(pod.name, ranks.get(pod.name, ""), state, member.round))
        else:
            rows.append(NodeRow(pod.name, "", _state(pod, observed), 0))
    return tuple(rows)


def _state(pod: Pod, observed: Observed) -> str:
    """Return the displayed state of a pod without a member."""
    if pod.terminating:
        return "leaving"
    if not pod.active:
        return str(pod.phase)
    return "ending" if observed.rendezvous.state is RendezvousState.CLOSED else "starting"


def read_progress(logs: Path) -> Mapping[str, object]:
    """Return the newest progress report of all workers, preferably one with metrics."""
    reports = [one for pod in logs.glob(f"*/{WORKERS}/*") for one in _newest_reports(pod)]
    if not reports:
        return {}
    # Often only rank 0 reports metrics; the other workers' steps add nothing then.
    latest = max(reports, key=lambda one: (bool(one.metrics), one.at_ms))
    metrics = {name: float(f"{value:.4g}") for name, value in latest.metrics.items()}
    return {"step": latest.step, **metrics}


def _newest_reports(pod: Path) -> list[WorkerProgress]:
    """Return the progress reports of a pod's newest round that has any.

    A round that has just begun has none yet; otherwise a deleted pod's report would look newest.
    """
    rounds = {int(path.name[6:]): path for path in pod.glob("round_*") if _is_round(path)}
    for number in sorted(rounds, reverse=True):
        found = [read_progress_file(path) for path in rounds[number].glob("*/progress")]
        if reports := [one for one in found if one is not None and one.step >= 0]:
            return reports
    return []


def _is_round(path: Path) -> bool:
    return path.name[6:].isascii() and path.name[6:].isdigit()


NOTES = 8
OTHER_LINES = 6
"""Lines of the live table beside the nodes and the notes: two heads, three below, one free."""
FEWEST_NODES = 3
"""Number of nodes with a line of their own on the smallest terminal."""
PROGRESS_SECONDS = 5.0
"""Minimum interval between plain progress lines."""

STYLES = {
    Phase.RUNNING: "green",
    Phase.SUCCEEDED: "bold green",
    Phase.FAILED: "bold red",
    Phase.RESTARTING: "yellow",
}


class View(Protocol):
    """Display of a run."""

    def show(self, snapshot: Snapshot) -> None:
        """Show the current state; called at every change and periodically."""
        ...

    def note(self, elapsed_seconds: float, text: str) -> None:
        """Show an event."""
        ...

    def output(self, pod: str, line: str) -> None:
        """Show a line of a container's output."""
        ...

    def close(self) -> None: ...

    @property
    def gone(self) -> bool:
        """True if the output was closed by its reader."""
        ...

    @property
    def congested(self) -> bool:
        """True while output waits for its terminal: logs can be read later."""
        ...


def cause_text(cause: CauseStatus | None) -> str:
    """Format a cause as `loss: digits-1`, with its detail in parentheses."""
    if cause is None:
        return ""
    text = cause.kind
    if cause.members:
        text += ": " + ", ".join(cause.members)
    return text + (f" ({cause.detail})" if cause.detail else "")


def progress_text(progress: Mapping[str, object]) -> str:
    return "  ".join(f"{name} {value}" for name, value in progress.items())


def round_text(status: Status) -> str:
    """Format the current round as `round 3 final: 4 nodes, 4 workers, master digits-0`."""
    rendezvous = status.rendezvous
    if rendezvous is None or rendezvous.round == 0:
        return "no round yet"
    text = f"round {rendezvous.round} {rendezvous.state}"
    if rendezvous.state == "final":
        text += f": {counted(rendezvous.nodes, 'node')}, "
        text += counted(rendezvous.world_size, "worker")
        text += f", master {rendezvous.master}" if rendezvous.master else ""
    return text


def transition_text(status: Status) -> str:
    """Format phase, round, cause and restarts in one line, which changes only with one of them."""
    cause = status.rendezvous.cause if status.rendezvous else None
    text = f"{status.phase}, {round_text(status)}"
    text += f"  ({cause_text(cause)})" if cause else ""
    return text + (f", restarts {status.restarts}" if status.restarts else "")


class StoreNotes:
    """Notes on the rendezvous store becoming unavailable and available again."""

    def __init__(self) -> None:
        self._shown_text = ""

    def new(self, status: Status) -> str:
        """Return the text to print now; empty if nothing changed."""
        text = trouble_text(status)
        if text == self._shown_text:
            return ""
        self._shown_text = text
        if text:
            return f"{text}; {CONSEQUENCE}"
        return recovered_text(status)


class PlainView:
    """Display that prints a line per transition, with the time since the start."""

    def __init__(self, console: Console) -> None:
        self._store = StoreNotes()
        self._console = console
        self._shown = ""
        self._progress_due = PROGRESS_SECONDS
        self._progress: Mapping[str, object] = {}

    def show(self, snapshot: Snapshot) -> None:
        if trouble := self._store.new(snapshot.job.status):
            self.note(snapshot.elapsed_seconds, trouble)
        text = transition_text(snapshot.job.status)
        if text != self._shown:
            self._shown = text
            self.note(snapshot.elapsed_seconds, text)
        changed = bool(snapshot.progress) and snapshot.progress != self._progress
        if changed and snapshot.elapsed_seconds >= self._progress_due:
            self._progress = snapshot.progress
            self._progress_due = snapshot.elapsed_seconds + PROGRESS_SECONDS
            self.note(snapshot.elapsed_seconds, progress_text(snapshot.progress))

    def note(self, elapsed_seconds: float, text: str) -> None:
        self._line(f"[{elapsed_seconds:7.2f} s] {text}")

    def output(self, pod: str, line: str) -> None:
        self._console.print(output_text(pod, line), soft_wrap=True)

    def close(self) -> None:
        drain(self._console)

    @property
    def gone(self) -> bool:
        return is_gone(self._console)

    @property
    def congested(self) -> bool:
        return is_congested(self._console)

    def _line(self, text: str) -> None:
        self._console.print(one_line(text), markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """Display that redraws a table, with the last notes below it."""

    def __init__(self, console: Console) -> None:
        self._store = StoreNotes()
        self._notes: deque[str] = deque(maxlen=NOTES)
        self._snapshot: Snapshot | None = None
        self._shown = ""
        self._console = console
        # Drawn from our own loop: a refresh thread and fork do not mix.
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        if trouble := self._store.new(snapshot.job.status):
            self.note(snapshot.elapsed_seconds, trouble)
        rendezvous = snapshot.job.status.rendezvous
        if rendezvous is not None and rendezvous.state == "final":
            text = transition_text(snapshot.job.status)
            if text != self._shown:
                self._shown = text
                self.note(snapshot.elapsed_seconds, text)
        self._draw()

    def note(self, elapsed_seconds: float, text: str) -> None:
        self._notes.append(one_line(f"[{elapsed_seconds:7.2f} s] {text}"))
        self._draw()

    def output(self, pod: str, line: str) -> None:
        self._console.print(output_text(pod, line))

    def close(self) -> None:
        """Leave the last state on the screen."""
        drain(self._console)
        self._live.transient = False
        self._draw()
        self._live.stop()
        drain(self._console)

    @property
    def gone(self) -> bool:
        return is_gone(self._console)

    @property
    def congested(self) -> bool:
        return is_congested(self._console)

    def _draw(self) -> None:
        if (screen := screen_of(self._console)) and screen.busy:
            return  # a terminal that accepts no output gets the newest table later
        room = max(1, self._console.height - OTHER_LINES - FEWEST_NODES)
        newest = list(self._notes)[-room:]
        notes = Text("\n".join(newest), style="dim", no_wrap=True, overflow="ellipsis")
        if self._snapshot is None:
            self._live.update(notes, refresh=True)
        else:
            most = self._console.height - len(newest) - OTHER_LINES
            shown = render(self._snapshot, self._console.width, max(most, FEWEST_NODES))
            self._live.update(Group(*shown, notes), refresh=True)


def output_text(pod: str, line: str) -> Text:
    """Return a line of a container's output for a console, with its colours."""
    return Text.assemble(one_line(pod), " ", Text.from_ansi(log_line(line)))


def render(snapshot: Snapshot, width: int, most_nodes: int) -> tuple[Text, Text, Text]:
    """Return the head line, the table of nodes, and the progress.

    Args:
        snapshot: state of the job.
        width: columns of the terminal.
        most_nodes: maximum number of nodes with a line of their own.
    """
    job, status = snapshot.job, snapshot.job.status
    phase = status.phase or Phase.PENDING
    head = Text.assemble(
        (clip(job.metadata.name, max(NARROWEST, width // 3)), "bold"),
        "  ",
        (str(phase), STYLES.get(phase, "")),
        f"  {snapshot.elapsed_seconds:.0f} s  restarts {status.restarts}/{job.spec.max_restarts}"
        f"  {one_line(round_text(status))}",
        no_wrap=True,
        overflow="ellipsis",
    )
    shown, rest = chosen_nodes(snapshot.nodes, most_nodes)
    rows = [("NODE", "RANKS", "STATE", "ROUND")]
    rows += [(row.pod, row.ranks, row.state, str(row.round or "")) for row in shown]
    table = aligned(rows, width) + ([rest] if rest else [])
    cause = cause_text(status.rendezvous.cause if status.rendezvous else None)
    trouble = trouble_text(status)
    below = [trouble] if trouble else []
    below += [f"cause: {cause}"] if cause else []
    below += [progress_text(snapshot.progress)] if snapshot.progress else []
    return head, _uncut(table), _uncut(map(one_line, below))


def _uncut(lines: Iterable[str]) -> Text:
    """Return lines of which a terminal shows one each, with an ellipsis where they are too long."""
    return Text("\n".join(lines), no_wrap=True, overflow="ellipsis")


def chosen_nodes(nodes: Sequence[NodeRow], most: int) -> tuple[list[NodeRow], str]:
    """Return the nodes that get a line, and a line that counts the others by their states.

    Nodes that do not run come first: those are the ones to look at.
    """
    if len(nodes) <= most:
        return list(nodes), ""
    ranked = sorted(range(len(nodes)), key=lambda at: nodes[at].state == MemberState.RUNNING)
    shown = sorted(ranked[: most - 1])
    counts = Counter(nodes[at].state for at in ranked[most - 1 :])
    others = ", ".join(f"{number} {state}" for state, number in counts.most_common())
    return [nodes[at] for at in shown], f"and {len(nodes) - len(shown)} more: {others}"
