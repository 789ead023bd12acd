"""Control socket of a running local job: one JSON line each way over a unix socket.

The socket is in the run's own folder, which only its user can enter.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.local.state import JobFolder

SOCKET = "control.sock"
SECONDS = 60.0
Answer = dict[str, Any]
Act = Callable[[str, dict[str, Any]], Awaitable[Answer]]


async def serve(path: Path, act: Act) -> asyncio.Server:
    """Serve control commands at `path` with `act(verb, arguments)`; send back a `CommandError`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                request = json.loads(await reader.readline())
                reply: Answer
                try:
                    reply = {"ok": await act(request["verb"], request["arguments"])}
                except CommandError as error:
                    reply = {"error": str(error), "exitCode": error.exit_code}
                writer.write(json.dumps(reply).encode() + b"\n")
                await writer.drain()
        except (OSError, TimeoutError, ValueError, KeyError):
            pass  # the caller went away or sent something else
        finally:
            writer.close()

    return await asyncio.start_unix_server(answer, path)


def call(folder: JobFolder, verb: str, **arguments: object) -> Answer:
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
    except OSError as error:
        raise CommandError(
            f'the runner of "{folder.name}" (process {run.pid}) does not answer: {error}'
        ) from error
    if not line:
        raise CommandError(f'job "{folder.name}" ended before it answered')
    reply = json.loads(line)
    if "error" in reply:
        error_type = BadInput if reply["exitCode"] == BadInput("").exit_code else CommandError
        raise error_type(reply["error"])
    answer: Answer = reply["ok"]
    return answer
