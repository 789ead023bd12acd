"""ElasticJob object."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from elasticjob_operator.model.base import OpenModel, SpecModel, Timestamp
from elasticjob_operator.model.spec import ElasticJobSpec
from elasticjob_operator.model.status import Status
from elasticjob_operator.model.template import Container

GROUP = "elasticjob.dev"
VERSION = "v1alpha1"
API_VERSION: Literal["elasticjob.dev/v1alpha1"] = "elasticjob.dev/v1alpha1"
KIND: Literal["ElasticJob"] = "ElasticJob"
PLURAL = "elasticjobs"
MAX_NAME = 55
"""Maximum length of a job's name: pod names, <job>-<index>, must fit the 63 characters of a DNS
label."""
JOB_NAME = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
"""Pattern of a job's name: a DNS label with a letter first, because the job's Service has the same
name."""


class Metadata(OpenModel):
    """Object metadata. Fields not declared here are kept."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME, pattern=JOB_NAME)]
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    deletion_timestamp: Timestamp | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class ElasticJob(SpecModel):
    """An elastic PyTorch job."""

    api_version: Literal["elasticjob.dev/v1alpha1"]
    kind: Literal["ElasticJob"]
    metadata: Metadata
    spec: ElasticJobSpec
    status: Status = Field(default_factory=Status)

    def trainer(self) -> Container:
        """Return the trainer container: the one named by `spec.trainer`, or the only one."""
        containers = self.spec.template.spec.containers
        if self.spec.trainer is None:
            return containers[0]
        return next(found for found in containers if found.name == self.spec.trainer)

    def manifest(self) -> dict[str, Any]:
        """Return the object as a document, for YAML or the API server."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
