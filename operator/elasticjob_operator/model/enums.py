"""Enumerations of the API. Their values appear in manifests and in kubectl's output."""

from __future__ import annotations

from enum import StrEnum


class Backend(StrEnum):
    """Store of the rendezvous."""

    ETCD = "etcd"
    ETCD_V2 = "etcd-v2"
    C10D = "c10d"


class ScaleUp(StrEnum):
    """Time at which new nodes may interrupt a running round."""

    IMMEDIATE = "Immediate"
    AFTER_CHECKPOINT = "AfterCheckpoint"


class WarmStart(StrEnum):
    """Start of workers: forked from a preloaded interpreter if possible, or always afresh."""

    AUTO = "Auto"
    OFF = "Off"


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
    SUSPENDED = "Suspended"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    INTERRUPTED = "Interrupted"
    """Only for local jobs: the process that ran the job ended before the job did."""


class RendezvousState(StrEnum):
    """State of the rendezvous, in the terms of torch's etcd rendezvous; Unknown if unreadable."""

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
