"""The ElasticJob API object: its models, its validation and the CRD made from it."""

from elasticjob_operator.model.enums import (
    Backend,
    CleanPodPolicy,
    ConditionType,
    Phase,
    RendezvousState,
    ScaleUp,
    WarmStart,
)
from elasticjob_operator.model.job import ElasticJob, Metadata
from elasticjob_operator.model.parse import parse_manifest
from elasticjob_operator.model.problems import InvalidManifest, Problem
from elasticjob_operator.model.spec import ElasticJobSpec
from elasticjob_operator.model.status import Status

__all__ = [
    "Backend",
    "CleanPodPolicy",
    "ConditionType",
    "ElasticJob",
    "ElasticJobSpec",
    "InvalidManifest",
    "Metadata",
    "Phase",
    "Problem",
    "RendezvousState",
    "ScaleUp",
    "Status",
    "WarmStart",
    "parse_manifest",
]
