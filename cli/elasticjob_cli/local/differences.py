"""Parts of a manifest that one machine does not have: its accelerators, and fields of the pod.

A local pod is the processes of its trainer: everything else of the template is ignored, and the
nodes of a job share the machine's accelerators.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elasticjob_cli.errors import BadInput
from elasticjob_launcher.devices import device_files
from elasticjob_operator.domain.manifests.resources import amounts, quantity
from elasticjob_operator.model import ElasticJob
from elasticjob_rendezvous.protocol.text import counted

Json = dict[str, Any]

_POD_FIELDS = ("containers", "initContainers", "restartPolicy", "terminationGracePeriodSeconds")
"""Fields of the pod's spec that a local run follows, or names by itself."""
_CONTAINER_FIELDS = ("name", "image", "command", "args", "env", "workingDir", "resources")
"""Fields of the trainer that a local run follows. `resources` only bounds a container."""
_HARMLESS = ("imagePullPolicy", "terminationMessagePath", "terminationMessagePolicy")
_HARMLESS_IN_POD = (
    "dnsPolicy", "enableServiceLinks", "preemptionPolicy", "schedulerName", "imagePullSecrets",
)  # fmt: skip
"""Fields without an effect on processes; an API server adds most of them."""


def ignored_parts(job: ElasticJob) -> list[str]:
    """Return the parts of the template that a local run ignores."""
    pod: Json = job.spec.template.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    trainer = job.trainer().name
    found = [f"init container {one['name']}" for one in pod.get("initContainers") or ()]
    others = [one for one in pod["containers"] if one["name"] != trainer]
    found += [f"container {one['name']}" for one in others]
    found += [name for name in _set(pod) if name not in (*_POD_FIELDS, *_HARMLESS_IN_POD)]
    own = next(one for one in pod["containers"] if one["name"] == trainer)
    known = (*_CONTAINER_FIELDS, *_HARMLESS)
    return found + [f"{trainer}.{name}" for name in _set(own) if name not in known]


def _set(fields: Json) -> Iterator[str]:
    return (name for name, value in fields.items() if value not in ({}, [], "", None))


def accelerators_wanted(job: ElasticJob) -> tuple[int, str]:
    """Return the accelerators that a node of the job needs, and the field that asks for them."""
    container = job.trainer().model_dump(mode="json", by_alias=True, exclude_none=True)
    requested = {**amounts(container, "requests"), **amounts(container, "limits")}
    found = {name: int(quantity(value) or 0) for name, value in requested.items() if "/" in name}
    if any(found.values()):
        name = max(found, key=lambda one: found[one])
        return found[name], name
    if str(job.spec.nproc_per_node) == "gpu":
        return 1, "spec.nprocPerNode: gpu"
    return 0, ""


def check_accelerators(job: ElasticJob, environ: Mapping[str, str], on_cpus: bool) -> list[str]:
    """Return remarks on accelerators that the nodes share or lack.

    Args:
        on_cpus: the user chose the number of workers, so that missing accelerators are accepted.

    Raises:
        BadInput: the job needs more accelerators for a node than the machine has.
    """
    wanted, field = accelerators_wanted(job)
    here = device_files(environ)
    nodes = job.spec.max_nodes if job.spec.nodes is None else job.spec.nodes
    if wanted > here:
        text = (
            f"{job.metadata.name} asks for {counted(wanted, 'accelerator')} for each node "
            f"({field}); "
            f"this machine has {here or 'none'}"
        )
        if not on_cpus:
            raise BadInput(
                f"{text}. Nothing was started: run it on a cluster with `kubectl apply -f`, or "
                "here without them with one worker for each node (--nproc-per-node 1; in Python "
                "workers=1)"
            )
        return [f"{text}; running without them"]
    if here and nodes > 1 and (wanted or job.spec.nproc_per_node is None):
        shared = counted(here, "accelerator")
        return [f"the {nodes} nodes of a local run share this machine's {shared}"]
    return []
