"""Worker of a partition run: appends the machine's monotonic time to a file of its own.

The first line is the time at which the process was forked: the interpreter's start-up time must not
hide a round that began too early. Standard library alone. Arguments: the folder of the logs, and
`stubborn` to ignore SIGTERM.
"""

import os
import signal
import sys
import time
from pathlib import Path

PERIOD_SECONDS = 0.02


def _forked_ns() -> int:
    """Return this process's start on the monotonic clock; the kernel rounds down to a tick."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[19])
    per_second = os.sysconf("SC_CLK_TCK")
    age = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - (ticks + 1) * 10**9 // per_second
    return time.monotonic_ns() - max(0, age)


def main(folder: Path, *options: str) -> None:
    if "stubborn" in options:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    env = os.environ
    number, rank, node = env["ELASTICJOB_ROUND"], env["RANK"], env["PARTITION_NODE"]
    finish = folder / "finish"
    path = folder / f"{number}-{rank}-{node}-{os.getpid()}"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    at = _forked_ns()
    while not finish.exists():
        os.write(log, f"{at} {number} {rank} {node}\n".encode())
        time.sleep(PERIOD_SECONDS)
        at = time.monotonic_ns()  # just before the write, when a checkpoint could last change


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
