"""Manifests that the tests apply, and the scripts in them that replace training."""

from __future__ import annotations

from typing import Any

from tests.cluster.images import EXAMPLE
from tests.e2e.console import Json

IMAGE = EXAMPLE
"""Image of examples/digits, present on every node: python3, torch, and train.py."""

COUNT = """
import os, pathlib, sys, time
me = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} pid {os.getpid()}"
last, step = float(sys.argv[1]) / 0.1, 0
while step < last and not pathlib.Path("/tmp/finish").exists():
    step += 1
    print(f"step {step} {me} restart {os.environ['TORCHELASTIC_RESTART_COUNT']}", flush=True)
    time.sleep(0.1)
print("finished", me, flush=True)
"""
"""Script that counts ten steps a second, for some seconds or until /tmp/finish exists. No torch."""

FOREVER = 100_000

CONTROL = "node-role.kubernetes.io/control-plane"
TOLERATION = {"key": CONTROL, "operator": "Exists", "effect": "NoSchedule"}


def counting(seconds: float = FOREVER) -> Json:
    """Return command and arguments of a trainer that only counts."""
    return {"command": ["python3", "-c", COUNT], "args": [str(seconds)]}


def digits(*options: object) -> Json:
    """Return command and arguments of real training, which reports every step."""
    steps = ["--steps", "100000", "--step-seconds", "0.2", "--report-seconds", "0"]
    return {"command": ["python3", "train.py"], "args": [*steps, *map(str, options)]}


DIGITS_UNTIL = """
import pathlib, runpy, sys
last = pathlib.Path("/tmp/last-step")
if last.exists():
    sys.argv += ["--steps", last.read_text()]
runpy.run_path("train.py", run_name="__main__")
"""
"""Script of the real training whose next round ends at the step in /tmp/last-step."""


def digits_until(*options: object) -> Json:
    """Return command and arguments of real training that ends at a step chosen while it runs."""
    return {"command": ["python3", "-c", DIGITS_UNTIL], "args": digits(*options)["args"]}


def container(work: Json, name: str = "trainer", **fields: Any) -> Json:
    return {"name": name, "image": IMAGE, **work, **fields}


SPREAD = {
    "maxSkew": 1,
    "topologyKey": "kubernetes.io/hostname",
    "whenUnsatisfiable": "ScheduleAnyway",
}
"""Topology constraint that spreads a job's pods over nodes, so that a test may lose one node."""


def job(
    name: str,
    work: Json | None = None,
    *,
    nodes: int = 2,
    least: int = 1,
    most: int | None = None,
    trainer: Json | None = None,
    others: tuple[Json, ...] = (),
    pod: Json | None = None,
    **spec: Any,
) -> Json:
    """Return an ElasticJob. `work` is the trainer's command and args, `trainer` more of its fields,
    `others` more containers, `pod` more of the pod's fields, `spec` more of the job's.
    """
    containers = [container(work or counting(), **(trainer or {})), *others]
    selector = {"matchLabels": {"elasticjob.dev/job-name": name}}
    pod_spec = {
        "terminationGracePeriodSeconds": 20,
        "topologySpreadConstraints": [SPREAD | {"labelSelector": selector}],
        "containers": containers,
        **(pod or {}),
    }
    return {
        "apiVersion": "elasticjob.dev/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": name},
        "spec": {
            "minNodes": least,
            "maxNodes": most or max(nodes, least),
            "nodes": nodes,
            "nprocPerNode": 1,
            "trainer": "trainer",
            **spec,
            "template": {"spec": pod_spec},
        },
    }


def on_control_plane(document: Json) -> Json:
    """Return a job or pod that runs on the control plane, and any other object unchanged."""
    match document["kind"]:
        case "Pod":
            chosen = {"nodeSelector": {CONTROL: ""}, "tolerations": [TOLERATION]}
            return document | {"spec": document["spec"] | chosen}
        case "ElasticJob":
            pod = on_control_plane({"kind": "Pod", **document["spec"]["template"]})
            template = {key: value for key, value in pod.items() if key != "kind"}
            return document | {"spec": document["spec"] | {"template": template}}
    return document
