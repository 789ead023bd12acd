"""Program that runs cells in a Jupyter kernel: JSON lists on its standard input and output.

Each cell has `code`, and optionally `interrupt`, a text of its output after which the kernel is
interrupted. Each result has the cell's streams as `text`, its `html` outputs and updates, and the
name of its `error`. The kernel is in a session of its own, and is ended by its process id alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from jupyter_client.blocking.client import BlockingKernelClient

START_SECONDS = 120.0
CELL_SECONDS = 120.0
Cell = dict[str, str]


def run_cell(client: BlockingKernelClient, kernel: int, cell: Cell) -> dict[str, Any]:
    result: dict[str, Any] = {"text": "", "html": [], "error": ""}
    sought = cell.get("interrupt", "")

    def take(message: dict[str, Any]) -> None:
        nonlocal sought
        content = message["content"]
        result["text"] += content.get("text", "")
        if "data" in content:
            result["html"].append(content["data"].get("text/html", ""))
        if sought and sought in result["text"]:
            sought = ""
            os.kill(kernel, signal.SIGINT)

    reply = client.execute_interactive(cell["code"], output_hook=take, timeout=CELL_SECONDS)
    if reply["content"]["status"] == "error":
        result["error"] = f"{reply['content']['ename']}: {reply['content']['evalue']}"
    return result


def main() -> None:
    cells: list[Cell] = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "connection.json")
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", str(place)]
        env = {**os.environ, "IPYTHONDIR": folder, "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        kernel = subprocess.Popen(
            command, env=env, stdout=sys.stderr, stdin=subprocess.DEVNULL, start_new_session=True
        )
        try:
            due = time.monotonic() + START_SECONDS
            while not (place.exists() and place.read_text().endswith("}")):
                assert kernel.poll() is None, "the kernel ended"
                assert time.monotonic() < due, "the kernel did not start"
                time.sleep(0.05)
            client = BlockingKernelClient()
            client.load_connection_file(str(place))
            client.start_channels()
            client.wait_for_ready(timeout=START_SECONDS)
            results = [run_cell(client, kernel.pid, cell) for cell in cells]
            client.shutdown()
            client.stop_channels()
            kernel.wait(START_SECONDS)
        finally:
            kernel.kill()
            kernel.wait()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
