"""Control commands of a running job, received over its control socket."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from elasticjob_cli.errors import BadInput
from elasticjob_cli.local import warden
from elasticjob_cli.local.pods import Kubelet, LocalPod
from elasticjob_cli.local.processes import Processes
from elasticjob_cli.local.stored import StoredJob
from elasticjob_operator.core.grace import grace_seconds
from elasticjob_operator.core.lifecycle import FINISHED
from elasticjob_operator.core.sizes import wanted_size
from elasticjob_rendezvous.core.roster import natural_order
from elasticjob_rendezvous.core.typed import echoed


class Verbs:
    """Handler of `scale`, `delete` and `fault` for one running job."""

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
            case "delete":
                self._stored.delete()
                self._note("deleted: draining")
                return {"graceSeconds": grace_seconds(self._stored.job)}
            case "fault":
                return {"done": self.fault(arguments["kind"], arguments["pod"])}
        raise BadInput(f"unknown command {echoed(verb)}: this runner may be of an older release")

    def scale(self, nodes: int) -> dict[str, Any]:
        """Write spec.nodes, as the scale subresource does."""
        job = self._stored.job
        if job.status.phase in FINISHED:
            raise BadInput(f'job "{job.metadata.name}" has ended and cannot be scaled')
        self._stored.change_spec(nodes=nodes)
        wanted = wanted_size(self._stored.job.spec).nodes
        self._note(f"scaled to {nodes} nodes" + (f", {wanted} legal" * (wanted != nodes)))
        return {"wanted": wanted}

    def fault(self, kind: str, name: str) -> str:
        """Inject a fault into a pod; return a description of it."""
        pod = self._pod(name)
        match kind:
            case "kill-worker":
                pid = self._worker(pod)
                warden.kill({pid})
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
        workers = warden.marked(warden.descendants({launcher}), b"LOCAL_RANK=0")
        if not workers:
            raise BadInput(f"no worker is running on {pod.name}")
        return min(workers)
