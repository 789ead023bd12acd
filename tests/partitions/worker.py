"""Worker of a partition run: appends the machine's monotonic time to a file of its own.

Standard library alone. Arguments: the folder of the logs, and `stubborn` to ignore SIGTERM.
"""

import os
import signal
import sys
import time
from pathlib import Path

PERIOD_SECONDS = 0.02


def main(folder: Path, *options: str) -> None:
    if "stubborn" in options:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    env = os.environ
    number, rank, node = env["ELASTICJOB_ROUND"], env["RANK"], env["PARTITION_NODE"]
    finish = folder / "finish"
    path = folder / f"{number}-{rank}-{node}-{os.getpid()}"
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while not finish.exists():
        # The time is read just before the write: what matters is when a checkpoint could change.
        os.write(log, f"{time.monotonic_ns()} {number} {rank} {node}\n".encode())
        time.sleep(PERIOD_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
