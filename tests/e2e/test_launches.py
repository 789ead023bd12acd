"""Launches decided in the pod, where the program of the command can be read."""

from __future__ import annotations

import pytest

from tests.e2e.console import Json
from tests.e2e.job_namespace import JobNamespace
from tests.e2e.manifests import job

pytestmark = pytest.mark.timeout(600, func_only=True)

NAME = "launches"
FOLDER = "/launches"
FOUND = "run_all.py, line 2 starts torchrun"
FILES = {
    "run_all.py": (
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-m', 'torch.distributed.run', '--nproc-per-node=2', "
        "'gang.py'], check=True)\n"
    ),
    "gang.py": (
        "import os, time, torch\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        'me = f"rank {dist.get_rank()} of {dist.get_world_size()} pid {os.getpid()}"\n'
        "for step in range(1, 100000):\n"
        "    total = torch.tensor([dist.get_rank()])\n"
        "    dist.all_reduce(total)\n"
        "    print(f'step {step} {me} total {int(total)}', flush=True)\n"
        "    time.sleep(0.2)\n"
    ),
}
"""Program that only starts torchrun, and the workers' script."""
TOTAL = "total 6"
"""Sum of the ranks of both nodes, each with two workers."""
KILL_A_WORKER = (
    "for file in /proc/[0-9]*/environ; do if grep -qz '^LOCAL_RANK=1$' $file; then "
    "kill -9 $(basename $(dirname $file)); fi; done 2>/dev/null"
)


def objects() -> list[Json]:
    """Return the program and its job, whose preparation hides the program from the operator."""
    line = f"cd {FOLDER} && exec python3 run_all.py"
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NAME}, "data": FILES},
        job(
            NAME,
            {"command": ["sh", "-c", line]},
            least=2,
            nprocPerNode=2,
            trainer={"volumeMounts": [{"name": "program", "mountPath": FOLDER}]},
            pod={"volumes": [{"name": "program", "configMap": {"name": NAME}}]},
        ),
    ]


def trains_together(ns: JobNamespace, after: int) -> int:
    """Wait until both workers of both nodes have a step in one round after `after`; return it."""
    number = int(ns.running(NAME, 2, after=after)["rendezvous"]["round"])
    ns.advances(NAME, 0, 60)

    def ranks() -> bool:
        last = ns.steps(NAME, tail=8)
        return {step.rest[:11] for step in last if TOTAL in step.rest} == {
            f"rank {rank} of 4" for rank in range(4)
        }

    ns.until(ranks, "a step of every rank", 60)
    return number


def test_launcher_found_in_the_pod_joins_the_job_and_is_shown(ns: JobNamespace) -> None:
    ns.apply(*objects())
    number = trains_together(ns, 0)
    launch = ns.status(NAME)["launch"]
    assert (launch["mode"], launch["reason"]) == ("PerNode", "LauncherFound")
    assert launch["message"] == FOUND
    ns.until(lambda: ("LaunchDecided", f"PerNode: {FOUND}") in ns.events(NAME), "the event")
    assert FOUND in ns.kubectl("describe", f"ej/{NAME}")
    for pod in ns.active(NAME):
        said = ns.log(pod)
        assert f"the command is run once for the node: {FOUND}" in said, said

    restarts = ns.status(NAME)["restarts"]
    ns.exec(f"{NAME}-1", "trainer", KILL_A_WORKER)
    number = trains_together(ns, number)
    ns.until(lambda: ns.status(NAME)["restarts"] == restarts + 1, "the charge")
    failure = ns.status(NAME)["lastFailure"]
    assert failure["pod"] == f"{NAME}-1"
    assert "Last interruption: a worker of launches-1 failed" in ns.plugin("explain", NAME)

    ns.patch(NAME, {"runPolicy": {"suspend": True}})
    ns.in_phase(NAME, "Suspended")
    ns.without_pods(NAME)
    assert ns.status(NAME)["launch"] == launch, "the finding is about the same program"
    ns.patch(NAME, {"runPolicy": {"suspend": False}})
    trains_together(ns, 0)
    assert ns.status(NAME)["launch"] == launch
    told = [text for reason, text in ns.events(NAME) if reason == "LaunchDecided"]
    assert told.count(f"PerNode: {FOUND}") == 1

    edited = {"launches.example/program": "2"}
    ns.patch(NAME, {"runPolicy": {"suspend": True}})
    ns.in_phase(NAME, "Suspended")
    ns.patch(NAME, {"template": {"metadata": {"annotations": edited}}})
    assert ns.status(NAME)["launch"] == launch, "an annotation selects no program"
    ns.patch(NAME, {"setup": ["true"]})
    ns.until(lambda: ns.status(NAME)["launch"]["mode"] == "PerWorker", "a decision without files")
    ns.delete(NAME)
