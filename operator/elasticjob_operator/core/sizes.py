"""Legal sizes of a job, and the wanted one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elasticjob_operator.model.spec import ElasticJobSpec


class Clamp(StrEnum):
    """Reason for which the wanted size differs from spec.nodes. Printed as a condition's reason."""

    BELOW_MIN_NODES = "BelowMinNodes"
    ABOVE_MAX_NODES = "AboveMaxNodes"
    BETWEEN_INCREMENTS = "BetweenIncrements"


@dataclass(frozen=True, slots=True)
class WantedSize:
    """Wanted size: `asked` is spec.nodes (maxNodes if absent), `nodes` the legal size."""

    nodes: int
    asked: int
    clamp: Clamp | None = None


def legal_sizes(spec: ElasticJobSpec) -> range:
    """Return the sizes minNodes + k * nodeIncrement, up to maxNodes."""
    return range(spec.min_nodes, spec.max_nodes + 1, spec.node_increment)


def wanted_size(spec: ElasticJobSpec) -> WantedSize:
    """Return the largest legal size that does not exceed spec.nodes, but at least minNodes."""
    sizes = legal_sizes(spec)
    asked = spec.max_nodes if spec.nodes is None else spec.nodes
    if asked < spec.min_nodes:
        return WantedSize(spec.min_nodes, asked, Clamp.BELOW_MIN_NODES)
    largest = sizes[(min(asked, spec.max_nodes) - spec.min_nodes) // spec.node_increment]
    if largest == asked or spec.nodes is None:
        return WantedSize(largest, asked)
    clamp = Clamp.ABOVE_MAX_NODES if asked > spec.max_nodes else Clamp.BETWEEN_INCREMENTS
    return WantedSize(largest, asked, clamp)
