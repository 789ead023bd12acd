"""Display of `elasticjob run`: a live table at a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elasticjob_cli.local.screen import is_gone
from elasticjob_cli.local.snapshot import Snapshot
from elasticjob_operator.core.store_status import over_text, trouble_text
from elasticjob_operator.model import Phase
from elasticjob_operator.model.status import CauseStatus, Status
from elasticjob_rendezvous.core.store_health import CONSEQUENCE

NOTES = 8
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
        text += f": {rendezvous.nodes} nodes, {rendezvous.world_size} workers"
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
        self._told = ""

    def new(self, status: Status) -> str:
        """Return the text to print now; empty if nothing changed."""
        text = trouble_text(status)
        if text == self._told:
            return ""
        self._told = text
        if text:
            return f"{text}; {CONSEQUENCE}"
        return over_text(status)


class PlainView:
    """Display that prints a line per transition, with the time since the start."""

    def __init__(self, console: Console) -> None:
        self._store = StoreNotes()
        self._console = console
        self._shown = ""
        self._progress_due = PROGRESS_SECONDS
        self._progress: Mapping[str, object] = {}

    def show(self, snapshot: Snapshot) -> None:
        if said := self._store.new(snapshot.job.status):
            self.note(snapshot.elapsed_seconds, said)
        text = transition_text(snapshot.job.status)
        if text != self._shown:
            self._shown = text
            self.note(snapshot.elapsed_seconds, text)
        told = bool(snapshot.progress) and snapshot.progress != self._progress
        if told and snapshot.elapsed_seconds >= self._progress_due:
            self._progress = snapshot.progress
            self._progress_due = snapshot.elapsed_seconds + PROGRESS_SECONDS
            self.note(snapshot.elapsed_seconds, progress_text(snapshot.progress))

    def note(self, elapsed_seconds: float, text: str) -> None:
        self._line(f"[{elapsed_seconds:7.2f} s] {text}")

    def output(self, pod: str, line: str) -> None:
        self._line(f"{pod} {line}")

    def close(self) -> None: ...

    @property
    def gone(self) -> bool:
        return is_gone(self._console)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


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
        if said := self._store.new(snapshot.job.status):
            self.note(snapshot.elapsed_seconds, said)
        rendezvous = snapshot.job.status.rendezvous
        if rendezvous is not None and rendezvous.state == "final":
            text = transition_text(snapshot.job.status)
            if text != self._shown:
                self._shown = text
                self.note(snapshot.elapsed_seconds, text)
        self._draw()

    def note(self, elapsed_seconds: float, text: str) -> None:
        self._notes.append(f"[{elapsed_seconds:7.2f} s] {text}")
        self._draw()

    def output(self, pod: str, line: str) -> None:
        self._console.print(f"{pod} {line}", markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last state on the screen."""
        self._live.transient = False
        self._draw()
        self._live.stop()

    @property
    def gone(self) -> bool:
        return is_gone(self._console)

    def _draw(self) -> None:
        notes = Text("\n".join(self._notes), style="dim", no_wrap=True, overflow="ellipsis")
        if self._snapshot is None:
            self._live.update(notes, refresh=True)
        else:
            self._live.update(Group(*picture(self._snapshot), notes), refresh=True)


def picture(snapshot: Snapshot) -> tuple[Text, Table, Text]:
    """Return the head line, the table of nodes, and the progress."""
    job, status = snapshot.job, snapshot.job.status
    phase = status.phase or Phase.PENDING
    head = Text.assemble(
        (job.metadata.name, "bold"),
        "  ",
        (str(phase), STYLES.get(phase, "")),
        f"  {snapshot.elapsed_seconds:.0f} s  restarts {status.restarts}/{job.spec.max_restarts}"
        f"  {round_text(status)}",
        no_wrap=True,
        overflow="ellipsis",
    )
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in ("NODE", "RANKS", "STATE", "ROUND"):
        table.add_column(column)
    for row in snapshot.nodes:
        table.add_row(row.pod, row.ranks, row.state, str(row.round or ""))
    cause = cause_text(status.rendezvous.cause if status.rendezvous else None)
    trouble = trouble_text(status)
    below = [trouble] if trouble else []
    below += [f"cause: {cause}"] if cause else []
    below += [progress_text(snapshot.progress)] if snapshot.progress else []
    return head, table, Text("\n".join(below), no_wrap=True, overflow="ellipsis")
