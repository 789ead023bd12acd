"""Control socket of a running local job, and the commands that it accepts.

One JSON line goes each way over a unix socket in the run's own folder, which only its user can
enter.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.local import supervisor
from elasticjob_cli.local.job_store import JobFolder
from elasticjob_cli.local.kubelet import Kubelet, LocalPod
from elasticjob_cli.local.processes import Processes
from elasticjob_cli.local.stored_job import StoredJob
from elasticjob_operator.domain.plan.lifecycle import FINISHED, grace_seconds
from elasticjob_operator.domain.plan.sizes import wanted_size
from elasticjob_operator.model.types import MAX_NODES
from elasticjob_rendezvous.protocol.records.roster import natural_order
from elasticjob_rendezvous.protocol.text import counted, echoed

SOCKET = "control.sock"
SECONDS = 60.0
POLL_SECONDS = 0.05
END_SECONDS = 30.0
"""Time for a runner to exit, in addition to its pods' grace period."""
Answer = dict[str, Any]
Handler = Callable[[str, dict[str, Any]], Awaitable[Answer]]


async def serve(path: Path, act: Handler) -> asyncio.Server:
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


class ControlCommands:
    """Handler of `scale`, `suspend`, `delete` and `fault` for one running job."""

    def __init__(
        self,
        stored: StoredJob,
        kubelet: Kubelet,
        processes: Processes,
        note: Callable[[str], None],
    ) -> None:
        self._stored = stored
        self._note = note
        self._kubelet = kubelet
        self._processes = processes

    async def act(self, verb: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Execute a command; raises `CommandError` if it is not possible now."""
        match verb:
            case "scale":
                return self.scale(arguments["nodes"])
            case "suspend":
                self._note("suspended: stopping the job after a checkpoint")
                self._stored.stop()
                return {}
            case "delete":
                self._stored.delete()
                self._note("deleted: stopping the job")
                # Once to save, and once to end.
                return {"graceSeconds": 2 * grace_seconds(self._stored.job)}
            case "fault":
                return {"done": self.fault(arguments["kind"], arguments["pod"])}
        raise BadInput(f"unknown command {echoed(verb)}: this runner may be of an older release")

    def scale(self, nodes: object) -> dict[str, Any]:
        """Write spec.nodes, as the scale subresource does."""
        job = self._stored.job
        if job.status.phase in FINISHED:
            raise BadInput(f'job "{job.metadata.name}" has ended and cannot be scaled')
        if not isinstance(nodes, int) or not 0 <= nodes <= MAX_NODES:
            raise BadInput(
                f"the number of nodes must be from 0 to {MAX_NODES}, not {echoed(nodes)}"
            )
        self._stored.change_spec(nodes=nodes)
        wanted = wanted_size(self._stored.job).nodes
        note = "" if wanted == nodes else f", {wanted} legal"
        self._note(f"scaled to {counted(nodes, 'node')}{note}")
        return {"wanted": wanted}

    def fault(self, kind: str, name: str) -> str:
        """Inject a fault into a pod; return a description of it."""
        pod = self._pod(name)
        match kind:
            case "kill-worker":
                pid = self._worker(pod)
                supervisor.kill({pid})
                done = f"killed worker process {pid} of {name}"
            case "kill-agent":
                self._processes.signal(pod.agent, signal.SIGKILL)
                done = f"killed the agent of {name}"
            case "kill-node":
                self._kubelet.kill(pod)
                done = f"killed every process of {name}"
            case "drain":
                self._kubelet.delete(pod.uid, grace_seconds(self._stored.job))
                done = f"draining {name}"
            case _:
                raise BadInput(f"unknown fault {echoed(kind)}")
        self._note(f"fault: {done}")
        return done

    def _pod(self, name: str) -> LocalPod:
        pod = self._kubelet.find(name)
        if pod is None or pod.launcher_exit is not None:
            running = {pod.name for pod in self._kubelet.pods.values() if not pod.launcher_exit}
            there = ", ".join(sorted(running, key=natural_order)) or "none"
            raise BadInput(f'no running pod "{name}"; running are: {there}')
        return pod

    def _worker(self, pod: LocalPod) -> int:
        launcher = self._processes.pids.get(pod.launcher, -1)
        workers = supervisor.marked(supervisor.descendants({launcher}), b"LOCAL_RANK=0")
        if not workers:
            raise BadInput(f"no worker is running on {pod.name}")
        return min(workers)
