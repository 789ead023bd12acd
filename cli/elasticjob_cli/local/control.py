"""Server of the control socket of a running local job, and the commands that it accepts."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.local import supervisor
from elasticjob_cli.local.control_client import SECONDS, Answer
from elasticjob_cli.local.kubelet import Kubelet, LocalPod
from elasticjob_cli.local.processes import Processes
from elasticjob_cli.local.stored_job import StoredJob
from elasticjob_operator.domain.plan.lifecycle import FINISHED, grace_seconds
from elasticjob_operator.domain.plan.sizes import wanted_size
from elasticjob_operator.model.types import MAX_NODES
from elasticjob_rendezvous.protocol.records.roster import natural_order
from elasticjob_rendezvous.protocol.text import counted, echoed

SOCKET = "control.sock"
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
