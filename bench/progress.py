"""Cost of a training script's calls to `elasticjob.train`: `python -m bench.progress`."""

from __future__ import annotations

import tempfile
import timeit
from pathlib import Path

from elasticjob import layout
from elasticjob.train import Link

CALLS = 100_000
REPEATS = 3


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        request = Path(folder, "request")
        request.write_bytes(layout.pack_request(None))
        progress = str(Path(folder, "progress"))
        link = Link({layout.PROGRESS_FILE: progress, layout.REQUEST_FILE: str(request)})
        calls = {
            "progress(step)": lambda: link.progress(7, {}),
            "progress(step, loss=…, accuracy=…)": lambda: link.progress(
                7, {"loss": 0.25, "accuracy": 0.875}
            ),
            "should_checkpoint()": link.should_checkpoint,
        }
        for name, call in calls.items():
            seconds = min(timeit.repeat(call, number=CALLS, repeat=REPEATS)) / CALLS
            print(f"{name:36} {seconds * 1e6:6.2f} µs")


if __name__ == "__main__":
    main()
