"""State of a job's pods, read from Pod objects.

The outcome of a pod is that of its trainer container: another container may keep the pod
Running long after the trainer's end, and the pod's phase may be Failed although the trainer
did not fail.

A kubelet reports the end of a container by its machine's clock. Delays counted from an end,
such as the back-off after a pod that could not start, use the operator's clock. Every end is
therefore clamped to the time between the pod's creation and its first observation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import replace
from datetime import datetime
from typing import Any

from elasticjob_operator.domain.json_object import Json
from elasticjob_operator.domain.manifests.names import (
    AGENT_CONTAINER,
    INCARNATION_LABEL,
    pod_labels,
)
from elasticjob_operator.domain.observed.container_state import (
    MAX_MESSAGE,
    Blocked,
    Raw,
    ended,
    ending,
    has_run,
    init_trouble,
    is_preparing,
    message_of,
    never_ran,
    running,
    statuses,
    waiting_trouble,
)
from elasticjob_operator.domain.observed.node_state import Node, state_for_pod
from elasticjob_operator.domain.observed.pod_identity import (
    PREFIX_VARIABLE,
    has_lost_owner,
    incarnation_of,
    index_in,
    index_of,
)
from elasticjob_operator.domain.observed.state import (
    DISRUPTIONS,
    NodeState,
    Obstacle,
    Pod,
    PodEnd,
    PodPhase,
)
from elasticjob_operator.model.job import GROUP, ElasticJob
from elasticjob_rendezvous.protocol.text import one_line, printable, shortened
from elasticjob_rendezvous.protocol.worker_group import STUCK_EXIT_CODE, STUCK_MESSAGE


def lost_labels(job: ElasticJob, raw: Json) -> tuple[str, ...]:
    """Return the labels that the pod lacks or has with another value, each as `key=value`."""
    metadata = raw["metadata"]
    labels, index = metadata.get("labels") or {}, index_of(job, metadata["name"])
    if index is None:
        return ()
    incarnation = incarnation_of(raw)
    wanted = pod_labels(job, index, incarnation)
    if not incarnation:
        del wanted[INCARNATION_LABEL]
    return tuple(f"{key}={value}" for key, value in wanted.items() if labels.get(key) != value)


def first_seen_ends(
    pods: Iterable[Pod], before: Mapping[str, datetime], now: datetime
) -> dict[str, datetime]:
    """Return the time of the first observation of each pod's end, by uid; `before` is the
    previous result."""
    return {pod.uid: before.get(pod.uid, now) for pod in pods if pod.ended_at is not None}


def clamp_end(pod: Pod, seen: Mapping[str, datetime]) -> Pod:
    """Return the pod with its end clamped to the time from its creation to the observation."""
    if pod.ended_at is None or pod.uid not in seen:
        return pod
    return replace(pod, ended_at=max(min(pod.ended_at, seen[pod.uid]), pod.created_at))


def without_members(pods: Iterable[Pod], joined: Set[str]) -> tuple[Pod, ...]:
    """Return the pods; the failure of one whose uid is in `joined` is not a launch failure.

    A member had a launcher, even if the trainer's own readiness probe or a readiness gate of the
    pod kept the pod from ever being Ready.
    """
    return tuple(
        replace(pod, launch_failed=False) if pod.launch_failed and pod.uid in joined else pod
        for pod in pods
    )


MAX_TOLERATIONS = 256
"""Maximum number of a pod's tolerations that are considered."""
_METADATA = ("name", "uid", "creationTimestamp", "deletionTimestamp")
_STATUS = (
    *("phase", "reason", "message", "podIP", "conditions"),
    *("containerStatuses", "initContainerStatuses"),
)


def used_fields(raw: Json) -> Json:
    """Return the parts of a Pod object that the operator reads: the whole of many pods would need
    too much memory."""
    metadata, spec, status = raw["metadata"], raw["spec"], raw.get("status") or {}
    labels = metadata.get("labels") or {}
    kept = {name: metadata[name] for name in _METADATA if name in metadata}
    kept["labels"] = {key: labels[key] for key in labels if key.startswith(f"{GROUP}/")}
    kept["ownerReferences"] = [
        reference
        for reference in metadata.get("ownerReferences") or ()
        if reference.get("controller") is True
    ]
    return {
        "metadata": kept,
        "spec": {
            "nodeName": spec.get("nodeName"),
            "tolerations": (spec.get("tolerations") or [])[:MAX_TOLERATIONS],
            "initContainers": [_agent(container) for container in spec.get("initContainers") or ()],
            "containers": [_limits(container) for container in spec.get("containers") or ()],
        },
        "status": {name: status[name] for name in _STATUS if name in status},
    }


def _agent(container: Json) -> Json:
    """Return the name of an init container, and the prefix of its keys if it is the agent."""
    env = container.get("env") or () if container["name"] == AGENT_CONTAINER else ()
    return {
        "name": container["name"],
        "env": [variable for variable in env if variable["name"] == PREFIX_VARIABLE],
    }


def _limits(container: Json) -> Json:
    """Return the name of a container and its memory limit."""
    limits = (container.get("resources") or {}).get("limits") or {}
    memory = {"memory": limits["memory"]} if "memory" in limits else {}
    return {"name": container["name"], "resources": {"limits": memory}}


_OVER = ("Succeeded", "Failed")
DISRUPTED = "DisruptionTarget"
"""Condition of a pod that is preempted, evicted or removed because of a taint."""


def pod_of(job: ElasticJob, raw: Json, nodes: Mapping[str, Node] | None) -> Pod | None:
    """Return the observed state of a pod of the job; see `observed_pod`."""
    found = observed_pod(raw, job.trainer().name, nodes)
    if found is None:
        return None
    # Another pod of a template with a nodeName is rejected, too.
    rejected = found.rejected and not (job.spec.template.spec.model_extra or {}).get("nodeName")
    return replace(
        found,
        lost_labels=lost_labels(job, raw),
        lost_owner=has_lost_owner(job, raw),
        rejected=rejected,
    )


def observed_pod(raw: Raw, trainer: str, nodes: Mapping[str, Node] | None) -> Pod | None:
    """Return the observed state of a pod; None if its name has no index.

    Args:
        raw: Pod object.
        trainer: name of the trainer container.
        nodes: all nodes of the cluster by name; None if nodes cannot be read.
    """
    metadata, status = raw["metadata"], raw.get("status") or {}
    index = index_in(metadata["name"])
    if index is None:
        return None
    found = statuses(raw, "containerStatuses").get(trainer)
    phase = _phase(status, found)
    has_ended = phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)
    disrupted = _condition(status, DISRUPTED)
    is_disrupted = disrupted.get("status") == "True"
    # The condition is set with, or shortly before, the deletion of a running pod.
    terminating = "deletionTimestamp" in metadata or (is_disrupted and not has_ended)
    started = running(found)
    waits = not has_ended and not started
    trouble = _obstacle(raw, found) if waits else None
    node_gone = _is_node_gone(raw, found, nodes)
    return Pod(
        index=index,
        name=metadata["name"],
        uid=metadata["uid"],
        created_at=_time(metadata["creationTimestamp"]),
        phase=phase,
        ready=not has_ended and _condition(status, "Ready").get("status") == "True",
        terminating=terminating,
        disruption=one_line(disrupted.get("reason") or DISRUPTED) if is_disrupted else "",
        node=raw["spec"].get("nodeName") or None,
        node_state=NodeState.NOT_READY if node_gone else _node_state(raw, nodes),
        node_gone=node_gone,
        launcher_since=_started_at(metadata, started) if started and not has_ended else None,
        obstacle=trouble.obstacle if trouble else None,
        obstacle_message=printable(trouble.message) if trouble else "",
        preparing=waits and trouble is None and _is_preparing(raw, found),
        over=status.get("phase") in _OVER,
        lingering=has_ended and status.get("phase") not in _OVER,
        stuck="" if waits else _stuck(raw),
        launch_failed=phase is PodPhase.FAILED
        and not terminating
        and (not is_disrupted or _is_evicted_before(status, found))
        and _failed_at_launch(status, found),
        rejected=phase is PodPhase.FAILED and _is_rejected(raw, found),
        ended_at=_ended_at(metadata, status, found) if has_ended else None,
        exit_code=(ended(found) or {}).get("exitCode"),
        end_message=(
            printable(_end_message(raw, found, disrupted)) if has_ended or is_disrupted else ""
        ),
        end=_end(status, found, disrupted),
    )


_ENDS = {
    "Evicted": PodEnd.EVICTED,
    "Preempting": PodEnd.PREEMPTED,
    "NodeLost": PodEnd.NODE_LOST,
    "NodeShutdown": PodEnd.EVICTED,
    "Shutdown": PodEnd.EVICTED,
    "Terminated": PodEnd.EVICTED,
}
"""PodEnd by the kubelet's `status.reason` of the whole pod."""


def _end(status: Raw, trainer: Raw | None, disrupted: Raw) -> PodEnd | None:
    """Return the cause of the pod's removal: the container's own end takes precedence, then the
    DisruptionTarget condition, then the kubelet's reason."""
    if (ended(trainer) or {}).get("reason") == "OOMKilled":
        return PodEnd.OUT_OF_MEMORY
    if disrupted.get("status") == "True":
        return DISRUPTIONS.get(disrupted.get("reason") or "")
    return _ENDS.get(status.get("reason") or "")


def _phase(status: Raw, trainer: Raw | None) -> PodPhase:
    if end := ended(trainer):
        return PodPhase.SUCCEEDED if end["exitCode"] == 0 else PodPhase.FAILED
    if status.get("phase") in _OVER:  # without a trainer status: evicted, or its node is gone
        return PodPhase(status["phase"])
    return PodPhase.RUNNING if running(trainer) else PodPhase.PENDING


def _condition(status: Raw, kind: str) -> Raw:
    found: Raw
    for found in status.get("conditions") or ():
        if found["type"] == kind:
            return found
    return {}


def _is_node_gone(raw: Raw, trainer: Raw | None, nodes: Mapping[str, Node] | None) -> bool:
    """Return True if the pod's Node was deleted.

    A Node without a trainer that has run there may be too new for the informer cache.
    """
    name, ran = raw["spec"].get("nodeName"), running(trainer) or ended(trainer)
    return bool(name and ran) and nodes is not None and name not in nodes


def _node_state(raw: Raw, nodes: Mapping[str, Node] | None) -> NodeState:
    node = (nodes or {}).get(raw["spec"].get("nodeName") or "")
    return (
        NodeState.READY
        if node is None
        else state_for_pod(node, raw["spec"].get("tolerations") or ())
    )


def _obstacle(raw: Raw, trainer: Raw | None) -> Blocked | None:
    """Return the obstacle that keeps the trainer from running, if there is one."""
    status = raw.get("status") or {}
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        message = scheduled.get("message") or scheduled.get("reason") or "no node was found for it"
        return Blocked(Obstacle.UNSCHEDULABLE, shortened(message, MAX_MESSAGE))
    for init in statuses(raw, "initContainerStatuses").values():
        if trouble := init_trouble(init):
            return trouble
    return waiting_trouble(trainer) if trainer else None


def _stuck(raw: Raw) -> str:
    """Return the last message of an agent that ended because the kernel does not end its workers;
    empty otherwise."""
    agent = statuses(raw, "initContainerStatuses").get(AGENT_CONTAINER) or {}
    last = ended(agent) or (agent.get("lastState") or {}).get("terminated") or {}
    if last.get("exitCode") != STUCK_EXIT_CODE:
        return ""
    return printable(message_of(last)) or STUCK_MESSAGE


_SANDBOX = "PodReadyToStartContainers"
"""Condition of a pod: its volumes are mounted, and its sandbox has a network."""


def _is_preparing(raw: Raw, trainer: Raw | None) -> bool:
    """Return True if a kubelet pulls the pod's images, creates its containers or runs its init
    containers.

    A pod whose volumes cannot be mounted also waits with reason ContainerCreating: the condition
    distinguishes it. The kubelet sets it from Kubernetes 1.29.
    """
    if trainer is None or _condition(raw["status"], _SANDBOX).get("status") == "False":
        return False
    inits = statuses(raw, "initContainerStatuses").values()
    return all(map(is_preparing, (*inits, trainer)))


def _failed_at_launch(status: Raw, trainer: Raw | None) -> bool:
    """Return True if the trainer never ran, or the pod was never Ready while it did.

    Ready means that the launcher and its member existed; records of the member prove it too, see
    `without_members`. lastTransitionTime moves only when the status changes; for a pod that was
    never Ready it precedes the trainer's start. A virtual kubelet may report none.
    """
    end = ended(trainer)
    if end is None:
        return running(trainer) is None
    if never_ran(end):
        return True
    ready, started = _condition(status, "Ready"), end.get("startedAt")
    changed = ready.get("lastTransitionTime")
    if ready.get("status") != "False" or not started:
        return False
    return not changed or _time(changed) <= _time(started)


def _is_evicted_before(status: Raw, trainer: Raw | None) -> bool:
    """Return True if the kubelet evicted the pod before its trainer ran. Such a pod may meet the
    same end again, as with an init container that exceeds its storage."""
    return status.get("reason") == "Evicted" and not has_run(trainer or {})


_REJECTIONS = frozenset(
    (
        *_ENDS,
        *("NodeAffinity", "NodePorts", "TaintToleration"),
        *("TopologyAffinityError", "UnexpectedAdmissionError"),
    )
)
"""The kubelet's `status.reason` of a pod that its machine does not start, beside OutOf…: the
machine shuts down or is short of something, its labels or taints have changed, another pod has the
port, no NUMA node has what the pod needs, or a device failed."""


_SHORTAGES = ("The node was low on resource", "The node had condition")
"""Beginnings of the kubelet's message on an eviction that no limit of the pod explains."""


def _is_rejected(raw: Raw, trainer: Raw | None) -> bool:
    """Return True if the kubelet rejected the pod, or ended it before a container of it ran.

    A pod whose init container ran may be evicted for its own use of storage, unless the message
    names a shortage of the machine.
    """
    status = raw.get("status") or {}
    reason = status.get("reason") or ""
    if reason not in _REJECTIONS and not reason.startswith("OutOf"):
        return False
    if reason == "Evicted" and (status.get("message") or "").startswith(_SHORTAGES):
        return not has_run(trainer or {})
    containers = [trainer or {}, *statuses(raw, "initContainerStatuses").values()]
    return not any(has_run(status) for status in containers)


def _started_at(metadata: Json, trainer: Raw) -> datetime:
    """Return the start time of the running trainer; that of the pod's creation if its kubelet
    reports none, as a virtual one may."""
    return _time(trainer.get("startedAt") or metadata["creationTimestamp"])


def _ended_at(metadata: Raw, status: Raw, trainer: Raw | None) -> datetime:
    """Return the end time of the trainer; if it has none, as in a pod rejected by its node, the
    latest time in the pod's conditions."""
    end = ended(trainer) or {}
    if finished := end.get("finishedAt"):
        return _time(finished)
    times = [found.get("lastTransitionTime") for found in status.get("conditions") or ()]
    return max(_time(time) for time in (*times, metadata["creationTimestamp"]) if time)


def _end_message(raw: Raw, trainer: Raw | None, disrupted: Raw) -> str:
    """Return a description of the trainer's end, or of the pod's."""
    status = raw.get("status") or {}
    if disrupted.get("status") == "True":
        return _joined(disrupted.get("reason"), disrupted.get("message"))
    if status.get("reason"):  # the kubelet's reason for the whole pod, e.g. Evicted
        return _joined(status["reason"], status.get("message"))
    if trainer is not None and (end := ended(trainer)):
        name = trainer["name"]
        text = f"container {name}: {ending(end, _memory_limit(raw, name))}"
        agent = ended(statuses(raw, "initContainerStatuses").get(AGENT_CONTAINER)) or {}
        silent = end["exitCode"] != 0 and not end.get("message")
        return (
            f"{text}; {AGENT_CONTAINER}: {message}"
            if silent and (message := message_of(agent))
            else text
        )
    for init in statuses(raw, "initContainerStatuses").values():
        if trouble := init_trouble(init):
            return trouble.message
    return "the trainer was not started"


def _joined(*parts: str | None) -> str:
    return shortened(": ".join(part.strip() for part in parts if part), MAX_MESSAGE)


def _memory_limit(raw: Raw, name: str) -> str | None:
    for container in raw["spec"].get("containers") or ():
        if container["name"] == name:
            limits: Mapping[str, Any] = (container.get("resources") or {}).get("limits") or {}
            return limits.get("memory")
    return None


def _time(time: str) -> datetime:
    """Parse a time from the API server, which is always UTC."""
    return datetime.fromisoformat(time)
