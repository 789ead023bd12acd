"""Client of the control socket of a running local job.

One JSON line goes each way over a unix socket in the run's own folder, which only its user can
enter. The client loads no models of the API, which take longer to load than the rest.
"""

from __future__ import annotations

import json
import socket
import time
from typing import Any

from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.local.job_store import JobFolder

SECONDS = 60.0
POLL_SECONDS = 0.05
END_SECONDS = 30.0
"""Time for a runner to exit, in addition to its pods' grace period."""
Answer = dict[str, Any]


def send_command(folder: JobFolder, verb: str, **arguments: object) -> Answer:
    """Send a command to a job's runner; raises `CommandError` if it refuses or does not run."""
    run = folder.run()
    if run is None or not folder.running():
        raise BadInput(
            f'job "{folder.name}" is not running: see its last status with '
            f"`elasticjob get {folder.name}`; start it again with `elasticjob run`"
        )
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(SECONDS)
            connection.connect(run.control)
            connection.sendall(json.dumps({"verb": verb, "arguments": arguments}).encode() + b"\n")
            with connection.makefile("rb") as stream:
                line = stream.readline()
    except (FileNotFoundError, ConnectionError):
        line = b""  # it removes its socket when the job ends
    except OSError as error:
        raise CommandError(
            f'the runner of "{folder.name}" (process {run.pid}) does not answer within '
            f"{SECONDS:g} s: {error.strerror or error}; repeat the command, or stop the process "
            f"with `kill {run.pid}`"
        ) from error
    if not line:
        raise CommandError(f'job "{folder.name}" ended before it answered')
    reply = json.loads(line)
    if "error" in reply:
        error_type = BadInput if reply["exitCode"] == BadInput("").exit_code else CommandError
        raise error_type(reply["error"])
    answer: Answer = reply["ok"]
    return answer


def no_resume(folder: JobFolder) -> BadInput:
    """Return the error for a local job, which a verb cannot resume."""
    if folder.running():
        return BadInput(f'job "{folder.name}" is running')
    run = folder.run()
    source = "" if run is None else f" (it ran {run.manifest})"
    return BadInput(f"a local job is resumed with `elasticjob run` in a terminal{source}")


def delete_job(folder: JobFolder) -> None:
    """Stop a local job if it runs, and delete its folder. Raises `CommandError`."""
    if folder.running():
        seconds = END_SECONDS
        try:
            seconds += send_command(folder, "delete").get("graceSeconds", 0)
        except CommandError:
            if folder.running():  # else it ended by itself meanwhile
                raise
        _wait_for_end(folder, seconds)
    folder.remove()


def _wait_for_end(folder: JobFolder, seconds: float) -> None:
    """Wait until the runner exits, which follows the drain of its pods."""
    deadline = time.monotonic() + seconds
    while folder.running():
        if time.monotonic() > deadline:
            run = folder.run()
            process = f" (process {run.pid})" if run else ""
            raise CommandError(
                f'the runner of "{folder.name}"{process} did not exit within {seconds:g} s: '
                "kill it, then delete the job again"
            )
        time.sleep(POLL_SECONDS)
