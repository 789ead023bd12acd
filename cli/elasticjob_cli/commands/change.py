"""Commands `elasticjob scale`, `delete` and `fault`, which control a running local job."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated

import typer

from elasticjob_cli.commands.options import DEFAULT_NAMESPACE, Name, Namespace
from elasticjob_cli.errors import BadInput, CommandError
from elasticjob_cli.local.control import send_command
from elasticjob_cli.local.job_store import JobFolder, find_job
from elasticjob_cli.output import show
from elasticjob_operator.model.types import MAX_NODES

POLL_SECONDS = 0.05
END_SECONDS = 30.0
"""Time for a runner to exit, in addition to its pods' grace period."""


def scale(
    name: Name,
    nodes: Annotated[
        int,
        typer.Option(
            "--nodes", "--replicas", min=0, max=MAX_NODES, help="Desired number of nodes."
        ),
    ],
    namespace: Namespace = DEFAULT_NAMESPACE,
) -> None:
    """Change the desired number of nodes of a running job.

    The number is clamped to the job's legal sizes (minNodes, maxNodes, nodeIncrement).

    \b
    Examples:
      elasticjob scale digits --nodes 4
    """
    answer = send_command(find_job(namespace, name), "scale", nodes=nodes)
    wanted = answer["wanted"]
    note = "" if wanted == nodes else f" ({nodes} is not a legal size of this job)"
    show(f"elasticjob.elasticjob.dev/{name} scaled to {wanted} nodes{note}")


def delete(name: Name, namespace: Namespace = DEFAULT_NAMESPACE) -> None:
    """Stop a job if it runs, and delete its status and logs.

    \b
    Examples:
      elasticjob delete digits
    """
    folder = find_job(namespace, name)
    if folder.running():
        seconds = END_SECONDS
        try:
            seconds += send_command(folder, "delete").get("graceSeconds", 0)
        except CommandError:
            if folder.running():  # else it ended by itself meanwhile
                raise
        _wait_for_end(folder, seconds)
    folder.remove()
    show(f'elasticjob.elasticjob.dev "{name}" deleted')


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


class Fault(StrEnum):
    """Faults that can be injected into a pod of a local job."""

    KILL_WORKER = "kill-worker"
    KILL_AGENT = "kill-agent"
    KILL_NODE = "kill-node"
    DRAIN = "drain"


def fault(
    kind: Annotated[Fault, typer.Argument(help="Fault to inject.", show_default=False)],
    name: Name,
    pod: Annotated[str, typer.Argument(help="Name of the pod, as `describe` shows it.")],
    namespace: Namespace = DEFAULT_NAMESPACE,
) -> None:
    """Inject a fault into a local job to test its recovery.

    kill-worker sends SIGKILL to the pod's first worker, kill-agent to its agent, kill-node to
    all of its processes. drain removes the pod as a node drain does, with its grace period.

    \b
    Examples:
      elasticjob fault kill-worker digits digits-0
      elasticjob fault drain digits digits-1
    """
    folder = find_job(namespace, name)
    if not folder.running():
        raise BadInput(f'job "{name}" is not running: faults need a running job')
    answer = send_command(folder, "fault", kind=kind, pod=pod)
    show(answer["done"])
