"""Python client of ElasticJob: `from elasticjob import Client, ElasticJob`.

Jobs run on this machine or on a cluster, by the functions that the verbs of `elasticjob` call.
"""

from elasticjob_cli.client.client import Client
from elasticjob_cli.client.definition import ElasticJob
from elasticjob_cli.client.submitted_job import JobFailed, JobResult, SubmittedJob
from elasticjob_cli.errors import BadInput, CommandError

__all__ = [
    "BadInput",
    "Client",
    "CommandError",
    "ElasticJob",
    "JobFailed",
    "JobResult",
    "SubmittedJob",
]
