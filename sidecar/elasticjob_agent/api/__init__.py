"""torch's elastic agent API without torch, on top of the agent that ElasticJob's pods run.

docs/agent-api.md describes how the two fit together, docs/reference.md lists every name.
"""

from elasticjob_agent.api.agent import ElasticAgent, SimpleElasticAgent
from elasticjob_agent.api.events import Event, EventSource, record
from elasticjob_agent.api.local_agent import LocalElasticAgent
from elasticjob_agent.api.metrics import configure, prof, put_metric
from elasticjob_agent.api.native_handler import DirectedHandler, create_handler
from elasticjob_agent.api.spec import (
    DEFAULT_ROLE,
    DefaultLogsSpecs,
    ProcessFailure,
    RunResult,
    SignalException,
    Std,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

__all__ = [
    "DEFAULT_ROLE",
    "DefaultLogsSpecs",
    "DirectedHandler",
    "ElasticAgent",
    "Event",
    "EventSource",
    "LocalElasticAgent",
    "ProcessFailure",
    "RunResult",
    "SignalException",
    "SimpleElasticAgent",
    "Std",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
    "configure",
    "create_handler",
    "prof",
    "put_metric",
    "record",
]
