"""Pictures of the documentation (`make pictures`): live table, dashboard, recovery times.

The table is the screen of `elasticjob run examples/digits/elasticjob.yaml` on a pseudo-terminal,
after a node was killed. The dashboard shows the same run in a headless browser, after a worker was
killed as well. The chart shows the first table of docs/performance.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib as mpl
from rich.console import Console
from rich.text import Text

from tests.integration.browser import Browser, browser

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = Path("examples", "digits", "elasticjob.yaml")
MEASURED = ROOT / "docs" / "performance.md"
IMAGES = ROOT / "docs" / "images"
ELASTICJOB = (sys.executable, "-m", "elasticjob_cli")
JOB, NODES, KILLED = "digits", "4", "digits-1"
COLUMNS, LINES = 96, 40
MORE_STEPS = ('"--steps", "300"', '"--steps", "3000"')
"""Change of the example's arguments, so that it runs until the last picture."""
STEP_SECONDS = 120.0
WINDOWS = {
    "light": ((1100, 1560), False),
    "dark": ((1100, 1560), True),
    "phone": ((390, 1560), False),
}
"""Size of the browser's window, and the preference for dark, of each picture of the dashboard."""

REDRAW = re.compile(r"(?:\r|\x1b\[2K|\x1b\[1A|\x1b\[\?25[lh])+")
"""Control sequences between two states of the table."""
SYSTEMS = (("ElasticJob", "#1b6ca8"), ("ElasticJob, cold", "#8fb8d8"), ("torchrun", "#d1495b"))


class Terminal:
    """Run of the job on a pseudo-terminal, which keeps the newest state of the table."""

    def __init__(self, home: Path) -> None:
        self.frame = ""
        self.env = {**os.environ, "XDG_STATE_HOME": str(home), "TERM": "xterm-256color"}
        folder = shutil.copytree(ROOT / EXAMPLE.parent, home / "example")  # without checkpoints
        manifest = folder / EXAMPLE.name
        manifest.write_text(manifest.read_text().replace(*MORE_STEPS))
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.execve(sys.executable, [*ELASTICJOB, "run", str(folder / EXAMPLE.name)], self.env)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Read to the end: a full pseudo-terminal would block the run."""
        drawn = ""
        with contextlib.suppress(OSError):  # the run has ended
            while True:
                drawn += os.read(self._fd, 1 << 16).decode(errors="replace").replace("\r\n", "\n")
                *whole, drawn = REDRAW.split(drawn)
                self.frame = next((part for part in reversed(whole) if JOB in part), self.frame)

    def until(self, shows: Callable[[str], bool]) -> str:
        """Return the first state of the table that `shows` accepts. Raises TimeoutError."""
        deadline = time.monotonic() + STEP_SECONDS
        while time.monotonic() < deadline:
            frame = self.frame
            if shows(Text.from_ansi(frame).plain):
                return frame
            time.sleep(0.02)
        raise TimeoutError(f"the table is not as expected:\n{self.frame}")

    def call(self, *arguments: str) -> None:
        """Run another command of the CLI for this job."""
        subprocess.run([*ELASTICJOB, *arguments], env=self.env, check=True, capture_output=True)

    def close(self) -> None:
        self.call("delete", JOB)
        os.waitpid(self._pid, 0)


def live_table(terminal: Terminal) -> str:
    """Return the table, with colours, after a node was killed and the others train again."""
    terminal.until(lambda text: "round 1 final" in text and "loss" in text)
    terminal.call("scale", JOB, "--nodes", NODES)
    terminal.until(lambda text: "round 2 final: 4 nodes" in text)
    time.sleep(5)
    terminal.call("fault", "kill-node", JOB, KILLED)
    return terminal.until(lambda text: len(re.findall(r"running +3\b", text)) == 3)


@contextlib.contextmanager
def dashboard(terminal: Terminal) -> Iterator[str]:
    """Serve the dashboard of the terminal's jobs; yield the address of the job's page."""
    command = [*ELASTICJOB, "dashboard"]
    server = subprocess.Popen(command, env=terminal.env, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"{server.stdout.readline().strip().partition(': ')[2]}jobs/default/{JOB}/"
    finally:
        server.terminate()
        server.communicate(timeout=20)


def draw_pages(terminal: Terminal, folder: Path) -> None:
    """Write the pictures of the job's page once the replacement trains and a worker was killed."""
    terminal.until(lambda text: "round 4 final: 4 nodes" in text)
    time.sleep(4)
    terminal.call("fault", "kill-worker", JOB, f"{JOB}-2")
    terminal.until(lambda text: "round 5 final: 4 nodes" in text)
    time.sleep(5)
    with dashboard(terminal) as address, browser() as tab:
        for name, (size, dark) in WINDOWS.items():
            draw_page(tab, address, folder / f"dashboard-{name}.png", size, dark)


def draw_page(tab: Browser, address: str, path: Path, size: tuple[int, int], dark: bool) -> None:
    """Write the picture of a page in a window, once its newest parts have arrived."""
    tab.look(size, dark)
    tab.open(address)
    tab.until("['#timeline svg', '#failures'].every((one) => document.querySelector(one))")
    tab.until("Number(document.querySelector('#live').dataset.count || 0) >= 1")
    tab.picture(path, whole=False)


def draw_table(frame: str, path: Path) -> None:
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(frame.rstrip()))
    console.save_svg(str(path), title=f"elasticjob run {EXAMPLE}")


def recovery_times(text: str) -> dict[str, list[float]]:
    """Return by fault the seconds of each system in the first table; only complete rows."""
    rows = re.findall(r"^\| (.+?) \| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) s \|", text, re.MULTILINE)
    found: dict[str, list[float]] = {}
    for fault, *seconds in rows:
        found.setdefault(fault, [float(each) for each in seconds])
    return found


def draw_chart(times: dict[str, list[float]], path: Path) -> None:
    """Draw a bar for each fault and system on a logarithmic scale."""
    mpl.use("svg")
    from matplotlib import pyplot

    mpl.rcParams["svg.hashsalt"] = "elasticjob"
    figure, axes = pyplot.subplots(figsize=(8, 3.4), layout="constrained")
    for number, (name, colour) in enumerate(SYSTEMS):
        places = [row + 0.26 * (number - 1) for row in range(len(times))]
        bars = axes.barh(
            places, [seconds[number] for seconds in times.values()], 0.24, color=colour, label=name
        )
        axes.bar_label(bars, fmt="%g s", padding=3, fontsize=8)
    axes.set_yticks(range(len(times)), list(times))
    axes.invert_yaxis()
    axes.set(xscale="log", xlim=(0.1, 150), xlabel="seconds until all workers communicate again")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_formatter("{x:g}")
    figure.legend(frameon=False, loc="outside upper center", ncols=len(SYSTEMS), fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    draw_chart(recovery_times(MEASURED.read_text()), IMAGES / "recovery.svg")
    with tempfile.TemporaryDirectory() as home:
        terminal = Terminal(Path(home))
        try:
            draw_table(live_table(terminal), IMAGES / "live-table.svg")
            draw_pages(terminal, IMAGES)
        finally:
            terminal.close()


if __name__ == "__main__":
    main()
