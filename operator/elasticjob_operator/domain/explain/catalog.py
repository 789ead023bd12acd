"""Catalog of phrases: deletions, causes, offences of machines, obstacles and failure classes.

Obstacles and failure classes have a meaning and a remedy; docs/explain.md repeats those of the
failure classes. `phrases` builds sentences from this catalog.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from elasticjob_operator.domain.observed.state import Obstacle
from elasticjob_operator.domain.plan.actions import DeleteReason
from elasticjob_operator.model.status import FailureStatus
from elasticjob_rendezvous.protocol.records.failures import STACK_HEADER, FailureClass
from elasticjob_rendezvous.protocol.records.members import ABORTED

DELETIONS: Mapping[DeleteReason, str] = {
    DeleteReason.SURPLUS_PENDING: "more than wanted; had not started",
    DeleteReason.SURPLUS_NODE_CORDONED: "more than wanted; its node is cordoned",
    DeleteReason.SURPLUS_NODE_TAINTED: "more than wanted; its node is tainted",
    DeleteReason.SURPLUS_NOT_IN_ROUND: "more than wanted; was not in the round",
    DeleteReason.SURPLUS_NODE_AVOIDED: "more than wanted; its node failed the job before",
    DeleteReason.SURPLUS_STRAGGLER: "more than wanted; was slower than its peers",
    DeleteReason.SURPLUS_HIGHEST_RANK: "more than wanted; had the highest rank",
    DeleteReason.MARKED: "was chosen to leave before",
    DeleteReason.REPLACED: "failed before and was replaced",
    DeleteReason.STUCK: "its workers wait in the kernel and cannot be ended",
    DeleteReason.SUSPENDED: "the job is suspended",
    DeleteReason.DEADLINE_EXCEEDED: "the job was active for too long",
    DeleteReason.JOB_DELETED: "the job is deleted",
    DeleteReason.JOB_FINISHED: "the job has finished (cleanPodPolicy)",
}
DETAILS = {reason.value: text for reason, text in DELETIONS.items()} | {
    "SIGTERM": "it was asked to end",
    "Terminating": "its pod is deleted",
    "EvictionByEvictionAPI": "its node was drained",
    "PreemptionByScheduler": "for a pod of higher priority",
    "TerminationByKubelet": "by its node",
    "DeletionByTaintManager": "its node was tainted",
    "DeletionByPodGC": "its node is gone",
    ABORTED: "its peers' collectives broke",
}
"""Phrases for the reasons of a cause with one member."""
PLURAL_DETAILS = {
    "SIGTERM": "they were asked to end",
    "Terminating": "their pods are deleted",
    "EvictionByEvictionAPI": "their nodes were drained",
    "PreemptionByScheduler": "for pods of higher priority",
    "TerminationByKubelet": "by their nodes",
    "DeletionByTaintManager": "their nodes were tainted",
    "DeletionByPodGC": "their nodes are gone",
    ABORTED: "their peers' collectives broke",
}
"""Phrases for the reasons of a cause with several members."""

OFFENCES: Mapping[str, str] = {
    FailureClass.NODE_LOST: "it was lost",
    FailureClass.SIGNAL: "a signal ended a worker",
    FailureClass.HANG: "a worker hung",
    FailureClass.HOST_OUT_OF_MEMORY: "its memory ran out",
}
"""Phrases for offences of machines."""
STUCK_OFFENCE = "once: its kernel did not end the workers"
"""Reason for which a machine is avoided after a single pod."""


class Entry(NamedTuple):
    """Meaning and remedy, both without a full stop."""

    meaning: str
    remedy: str


OBSTACLES: Mapping[Obstacle, Entry] = {
    Obstacle.UNSCHEDULABLE: Entry(
        "Pending", "Free or add machines that fit, or reduce the template's requests"
    ),
    Obstacle.IMAGE: Entry(
        "without its image", "Correct the image's name, or add the pull secret it needs"
    ),
    Obstacle.CONFIG: Entry(
        "not startable", "Correct what the template names: a ConfigMap, a Secret or a volume"
    ),
    Obstacle.INIT: Entry("blocked by an init container", "See that init container's log"),
    Obstacle.QUOTA: Entry("", "Raise the namespace's quota, or reduce the template's requests"),
    Obstacle.REFUSED: Entry("", "Change the rejected field, or ask the owner of the policy"),
    Obstacle.AGENT_RESOURCES: Entry(
        "",
        "Let the namespace's LimitRange admit the containers that the operator adds, or give them "
        "the amounts that a quota demands, or change "
        "sidecar.resources in the operator's chart: the agent needs 64Mi of memory",
    ),
    Obstacle.OWNER_REMOVED: Entry(
        "",
        "Find the webhook or policy with `kubectl get mutatingwebhookconfigurations`, and exclude "
        "objects with the label elasticjob.dev/job-uid from it",
    ),
    Obstacle.NAMESPACE_ENDS: Entry(
        "", "The job is deleted with its namespace: to continue, create it in another one"
    ),
    Obstacle.NAME_CONFLICT: Entry("", "Delete the object of that name, or rename the job"),
    Obstacle.TEMPLATE_INVALID: Entry("", "Suspend the job, correct spec.template and resume it"),
    Obstacle.ENDPOINT: Entry(
        "", "Allow the endpoint in the operator's chart, or leave rendezvous.endpoints empty"
    ),
    Obstacle.SECRET: Entry(
        "", "Create or correct the Secret that rendezvous.secretName names, or remove the field"
    ),
    Obstacle.BACKEND: Entry("", "Use another rendezvous.backend"),
    Obstacle.FOREIGN_ETCD: Entry(
        "", "Give this cluster an etcd of its own, or free that one if the other cluster is gone"
    ),
    Obstacle.RECORDS: Entry(
        "", "Find the program that writes below the job's prefix, then suspend and resume the job"
    ),
    Obstacle.NOT_SERVED: Entry(
        "", "Label the namespace as the operator requires, or run the job in another one"
    ),
}

_SCHEDULING_REMEDIES: Mapping[str, str] = {
    "persistentvolumeclaim": (
        "Create or bind the PersistentVolumeClaim, or name another one in the job: `kubectl "
        "describe pvc` shows its state"
    ),
    "scheduling gates": "The controller of the pods' schedulingGates must remove them",
}
"""Remedies for pods that do not wait for a machine, by a part of the scheduler's message."""


def obstacle_remedy(obstacle: Obstacle, message: str) -> str:
    """Return the remedy of an obstacle with this message, without a full stop."""
    if obstacle is Obstacle.UNSCHEDULABLE:
        for part, remedy in _SCHEDULING_REMEDIES.items():
            if part in message.lower():
                return remedy
    return OBSTACLES[obstacle].remedy


FAILURE_CLASSES: Mapping[str, Entry] = {
    FailureClass.USER_ERROR: Entry(
        "the training script failed",
        "Correct the script: its traceback is in status.lastFailure, its whole output in the "
        "pod's log",
    ),
    FailureClass.HOST_OUT_OF_MEMORY: Entry(
        "the machine's memory ran out",
        "Give the container more memory, or /dev/shm if shared memory is named, or use fewer "
        "data loaders or a smaller batch",
    ),
    FailureClass.CUDA_OUT_OF_MEMORY: Entry(
        "the GPU's memory ran out",
        "Use a smaller batch or a GPU with more memory, or see what else runs on it",
    ),
    FailureClass.OUT_OF_MEMORY: Entry(
        "memory ran out",
        "Use a smaller batch, or give the container or its GPU more memory",
    ),
    FailureClass.COLLECTIVE_TIMEOUT: Entry(
        "it timed out waiting for a peer",
        "Look at what the other ranks did at that time: one hung, or was slower than the timeout "
        "of the process group. If recovery.hangTimeoutSeconds is below that timeout, and steps "
        "are reported, that rank is found and named",
    ),
    FailureClass.HANG: Entry(
        "it hung, and not because it waited for a peer",
        "See where it hung: the stacks of all ranks are in the pods' logs",
    ),
    FailureClass.PEER_ABORT: Entry(
        "its connection to a peer broke, and no node is known to have left",
        "Look at the logs of the other ranks at that time: one of them ended first",
    ),
    FailureClass.SIGNAL: Entry(
        "a signal ended it",
        "See the end of the pod's log",
    ),
    FailureClass.LAUNCH_ERROR: Entry(
        "the workers could not be started",
        "Correct the command or the image",
    ),
    FailureClass.MASTER_PORT: Entry(
        "the port of rank 0 was taken by another program",
        "The round is retried with another port; with hostNetwork avoid fixed ports",
    ),
    FailureClass.NODE_LOST: Entry(
        "it disappeared without reporting an error, for example because its node was lost",
        "Check that machine; no restart is charged",
    ),
    FailureClass.PREEMPTED: Entry(
        "the cluster needed its resources for other pods",
        "Give the job a higher priority or machines of its own; another pod takes its place, and "
        "no restart is charged",
    ),
}
"""Meaning and remedy by class. A class that is absent here comes from a newer agent."""
_LOST_NODES: Mapping[bool | None, Entry] = {
    None: FAILURE_CLASSES[FailureClass.NODE_LOST],
    False: Entry(
        FAILURE_CLASSES[FailureClass.NODE_LOST].meaning,
        "Check that machine; another pod takes its place, and no restart is charged",
    ),
    True: Entry(
        "its agent did not answer for a while, for example because it had too little processor "
        "time or no network, or was restarted",
        "Check the load and the network of that machine; its pod ran on, its agent has registered "
        "again, and no restart is charged",
    ),
}
"""Meaning and remedy of a lost node by `FailureStatus.returned`."""
UNCHARGED_CLASSES = (FailureClass.NODE_LOST, FailureClass.PREEMPTED)
"""Classes of lost or preempted nodes: none of their workers failed."""
UNKNOWN_CLASS = Entry("a worker failed", "See the pod's log")
_NATIVE_CRASH = "Native code crashed: see the end of the pod's log"
_SIGNAL_SENT = (
    "Another process sent that signal: a program in the image, a script around the command, or a "
    "user on that machine"
)
_ULIMIT = "It reached a limit of its container (ulimit): raise that limit"
_CRASHES = (4, 6, 8, 11)
_SIGNAL_REMEDIES: Mapping[int, str] = {
    **dict.fromkeys(_CRASHES, _NATIVE_CRASH),
    1: _SIGNAL_SENT,
    2: _SIGNAL_SENT,
    3: _SIGNAL_SENT,
    7: "Give /dev/shm more room, if it was full, or the disk of a file that it had mapped; else "
    "native code crashed: see the end of the pod's log",
    9: "Something on that machine killed it, but not the memory limit of its container: see that "
    "machine's log",
    15: _SIGNAL_SENT,
    24: _ULIMIT,
    25: _ULIMIT,
}


def failure_meaning(failure: FailureStatus) -> str:
    """Return the meaning of a failure, without a full stop."""
    if failure.class_ == FailureClass.SIGNAL and failure.signal is failure.exit_code is None:
        return "its workers were ended from outside"
    if failure.class_ == FailureClass.NODE_LOST:
        return _LOST_NODES[failure.returned].meaning
    return FAILURE_CLASSES.get(failure.class_, UNKNOWN_CLASS).meaning


def failure_remedy(failure: FailureStatus) -> str:
    """Return the remedy of a failure, without a full stop."""
    explained = bool(failure.traceback)
    # A shell reports a signal that ended its command as exit code 128 + signal.
    signum = failure.signal or (failure.exit_code or 0) - 128
    of_signal = _SIGNAL_REMEDIES.get(signum)
    match failure.class_:
        case FailureClass.NODE_LOST:
            return _LOST_NODES[failure.returned].remedy
        case FailureClass.USER_ERROR if not explained:
            return "Correct the script: its whole output is in the pod's log"
        case FailureClass.SIGNAL if of_signal is not None:
            unexplained = signum in _CRASHES and not explained
            more = ", and set PYTHONFAULTHANDLER=1 to see where" if unexplained else ""
            return of_signal + more
        case FailureClass.COLLECTIVE_TIMEOUT if failure.traceback.startswith(STACK_HEADER):
            return (
                "Compare the stacks of all ranks, which are in the pods' logs: the ranks call "
                "collectives in different orders, or their network loses data"
            )
    return FAILURE_CLASSES.get(failure.class_, UNKNOWN_CLASS).remedy
