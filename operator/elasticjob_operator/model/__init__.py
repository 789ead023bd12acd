"""ElasticJob API object: its models, its validation and the CRD made from it."""

from elasticjob_operator.model.job import ElasticJob, ElasticJobSpec, Metadata
from elasticjob_operator.model.parse import parse_manifest
from elasticjob_operator.model.problems import InvalidManifest, Problem
from elasticjob_operator.model.status import Status
from elasticjob_operator.model.types import (
    Backend,
    CleanPodPolicy,
    ConditionType,
    Launch,
    Phase,
    RendezvousState,
    ScaleUp,
    WarmStart,
)

__all__ = [
    "Backend",
    "CleanPodPolicy",
    "ConditionType",
    "ElasticJob",
    "ElasticJobSpec",
    "InvalidManifest",
    "Launch",
    "Metadata",
    "Phase",
    "Problem",
    "RendezvousState",
    "ScaleUp",
    "Status",
    "WarmStart",
    "parse_manifest",
]
