"""Enumerations of the API, whose values appear in manifests and in kubectl's output, and limits.

They load without pydantic: the command line needs them to list and scale jobs.
"""

from __future__ import annotations

from enum import StrEnum

MAX_NODES = 16_384
"""Maximum number of nodes of a job. An administrator may lower it with an admission policy."""


class Backend(StrEnum):
    """Store of the rendezvous."""

    ETCD = "Etcd"
    ETCD_V2 = "EtcdV2"
    C10D = "C10d"

    @property
    def agent_name(self) -> str:
        """Name of the backend in the agent's settings and in `elasticjob agent --rdzv-backend`."""
        return _AGENT_NAMES[self]


_AGENT_NAMES = {Backend.ETCD: "etcd", Backend.ETCD_V2: "etcd-v2", Backend.C10D: "c10d"}


class ScaleUp(StrEnum):
    """Time at which new nodes may interrupt a running round."""

    IMMEDIATE = "Immediate"
    AFTER_CHECKPOINT = "AfterCheckpoint"


class WarmStart(StrEnum):
    """Start of workers: forked from a preloaded interpreter if possible, or never."""

    AUTO = "Auto"
    NEVER = "Never"


class Launch(StrEnum):
    """Runs of the trainer's command: once for each worker, or once for each pod, with torchrun in
    it; Auto decides by the command."""

    AUTO = "Auto"
    PER_WORKER = "PerWorker"
    PER_NODE = "PerNode"


class LaunchReason(StrEnum):
    """Reason for the way in which a command is launched."""

    REQUESTED = "Requested"
    PLAIN_COMMAND = "PlainCommand"
    LAUNCHER_REMOVED = "LauncherRemoved"
    PREPARATION_SPLIT = "PreparationSplit"
    SINGLE_WORKER = "SingleWorker"
    LAUNCHER_FOUND = "LauncherFound"
    LAUNCHER_OPTIONS = "LauncherOptions"
    SCRIPT_FILE = "ScriptFile"
    COMPUTED_PROGRAM = "ComputedProgram"


class CleanPodPolicy(StrEnum):
    """Pods to delete when the job has finished."""

    NONE = "None"
    RUNNING = "Running"
    ALL = "All"


class RestartPolicy(StrEnum):
    """Values a pod template may have: the job restarts workers, the kubelet must not."""

    NEVER = "Never"


class Phase(StrEnum):
    """State of the job in one word."""

    PENDING = "Pending"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    DELETING = "Deleting"
    """The job is being deleted, and its pods or finalizers remain."""
    INTERRUPTED = "Interrupted"
    """Only for local jobs: the process that ran the job ended before the job did."""


FINISHED = frozenset({Phase.SUCCEEDED, Phase.FAILED})
"""Phases of a job that has ended."""


class RendezvousState(StrEnum):
    """State of the rendezvous, in the terms of torch's etcd rendezvous; Unknown if unreadable."""

    SETUP = "setup"
    JOINABLE = "joinable"
    FROZEN = "frozen"
    FINAL = "final"
    CLOSED = "closed"
    UNKNOWN = "Unknown"


class ConditionType(StrEnum):
    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    CREATED = "Created"
    PODS_READY = "PodsReady"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    RESIZING = "Resizing"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    FINISHED = "Finished"
    NAME_CONFLICT = "NameConflict"
    TEMPLATE_INVALID = "TemplateInvalid"
    NODES_REFUSED = "NodesRefused"
    TEMPLATE_WARNINGS = "TemplateWarnings"
    RENDEZVOUS_UNAVAILABLE = "RendezvousUnavailable"
    SNAPSHOTS_IN_MEMORY = "SnapshotsInMemory"
    SNAPSHOTS_IN_STORAGE = "SnapshotsInStorage"


class ReplicaState(StrEnum):
    NOT_USED = "NotUsed"
    HEALTHY = "Healthy"
    INCOMPLETE = "Incomplete"


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"
