"""Number of workers per node."""

from __future__ import annotations

import re

from elasticjob_operator.model.job import ElasticJob

_ACCELERATOR = re.compile(
    r"(nvidia\.com/(gpu(\.shared)?|mig-.*)|amd\.com/gpu|gpu\.intel\.com/(i915|xe)|habana\.ai/gaudi)"
)
"""Names of resources whose unit is one device for one worker."""


def workers_per_node(job: ElasticJob) -> int:
    """Return nprocPerNode; for auto the accelerators requested by the trainer container, or 1."""
    if isinstance(job.spec.nproc_per_node, int):
        return job.spec.nproc_per_node
    resources = job.trainer().resources
    # Kubernetes requires an accelerator's request to equal its limit, so either one will do.
    asked = {**(resources.requests or {}), **(resources.limits or {})} if resources else {}
    devices = (amount for name, amount in asked.items() if _ACCELERATOR.fullmatch(name))
    return sum(int(amount) for amount in devices if amount.isdigit()) or 1
