"""The words of the API. Their values are what manifests hold and what kubectl prints."""

from __future__ import annotations

from enum import StrEnum


class Backend(StrEnum):
    """Who keeps the rendezvous."""

    ETCD = "etcd"
    ETCD_V2 = "etcd-v2"
    C10D = "c10d"


class ScaleUp(StrEnum):
    """When newcomers may interrupt a running round."""

    IMMEDIATE = "Immediate"
    AFTER_CHECKPOINT = "AfterCheckpoint"


class WarmStart(StrEnum):
    """Whether workers are forked from a preloaded interpreter."""

    AUTO = "Auto"
    OFF = "Off"


class CleanPodPolicy(StrEnum):
    """Which pods are deleted when the job has finished."""

    NONE = "None"
    RUNNING = "Running"
    ALL = "All"


class RestartPolicy(StrEnum):
    """What a pod template may say: restarts are the job's, never the kubelet's."""

    NEVER = "Never"


class Phase(StrEnum):
    """Where the job is, in one word."""

    PENDING = "Pending"
    RUNNING = "Running"
    RESTARTING = "Restarting"
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    INTERRUPTED = "Interrupted"
    """Only without a cluster: the process that ran the job ended before the job did."""


class RendezvousState(StrEnum):
    """The state of the rendezvous in the words of the reference; Unknown when unreadable."""

    SETUP = "setup"
    JOINABLE = "joinable"
    FROZEN = "frozen"
    FINAL = "final"
    CLOSED = "closed"
    UNKNOWN = "Unknown"


class ConditionType(StrEnum):
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
    RENDEZVOUS_UNAVAILABLE = "RendezvousUnavailable"


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"
