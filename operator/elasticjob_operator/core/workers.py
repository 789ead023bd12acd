"""How many workers a node of the job runs."""

from __future__ import annotations

import re

from elasticjob_operator.model.job import ElasticJob

_ACCELERATOR = re.compile(
    r"(nvidia\.com/(gpu(\.shared)?|mig-.*)|amd\.com/gpu|gpu\.intel\.com/(i915|xe)|habana\.ai/gaudi)"
)
"""Resource names that stand for one device a worker can have to itself."""


def workers_per_node(job: ElasticJob) -> int:
    """nprocPerNode; for auto the accelerators that the trainer container asks for, else 1."""
    if isinstance(job.spec.nproc_per_node, int):
        return job.spec.nproc_per_node
    resources = job.trainer().resources
    # Kubernetes wants an accelerator's request to equal its limit: either says how many.
    asked = {**(resources.requests or {}), **(resources.limits or {})} if resources else {}
    devices = (amount for name, amount in asked.items() if _ACCELERATOR.fullmatch(name))
    return sum(int(amount) for amount in devices if amount.isdigit()) or 1
