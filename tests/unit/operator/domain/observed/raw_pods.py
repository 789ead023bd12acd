"""Pod and Node objects as returned by an API server, for the tests of their parsing."""

from __future__ import annotations

import copy
from datetime import datetime
from typing import Any, Self

from elasticjob_operator.domain.manifests.names import pod_labels
from tests.unit.operator.builders import ago, job

Json = dict[str, Any]

CREATED, SCHEDULED, PREPARED, STARTED, READY, ENDED = (
    ago(seconds) for seconds in (300, 299, 295, 290, 288, 10)
)
NOT_READY = "containers with unready status: [elasticjob-agent trainer]"


def when(time: datetime) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def condition(kind: str, status: bool, since: datetime, **more: str) -> Json:
    return {
        "type": kind,
        "status": str(status),
        "lastProbeTime": None,
        "lastTransitionTime": when(since),
        **more,
    }


def container(name: str, state: Json, **more: Any) -> Json:
    return {
        "name": name,
        "image": f"registry.example/{name}:1",
        "imageID": "",
        "lastState": {},
        "ready": "running" in state,
        "restartCount": 0,
        "started": "running" in state,
        "state": state,
        **more,
    }


def running(since: datetime = STARTED) -> Json:
    return {"running": {"startedAt": when(since)}}


def waiting(reason: str, message: str | None = None) -> Json:
    return {"waiting": {"reason": reason} | ({"message": message} if message else {})}


def terminated(
    code: int,
    reason: str = "",
    message: str = "",
    since: datetime = STARTED,
    ended: datetime = ENDED,
) -> Json:
    said = {
        "containerID": "containerd://6a1c",
        "exitCode": code,
        "reason": reason or ("Completed" if code == 0 else "Error"),
        "startedAt": when(since),
        "finishedAt": when(ended),
    }
    return {"terminated": said | ({"message": message} if message else {})}


def start_error(message: str) -> Json:
    """Return containerd's state for a command that could not be executed."""
    state = terminated(128, "StartError", message)
    state["terminated"]["startedAt"] = "1970-01-01T00:00:00Z"
    return state


class RawPod:
    """Builder of a newly created pod, with its three containers."""

    def __init__(self, index: int = 2, generation: int = 0) -> None:
        self.raw: Json = {
            "metadata": {
                "name": f"job-{index}",
                "namespace": "ns",
                "uid": f"uid-{index}-{generation}",
                "creationTimestamp": when(CREATED),
                "labels": pod_labels(job(), index, 1),
            },
            "spec": {
                "containers": [
                    {"name": "trainer", "resources": {"limits": {"cpu": "2", "memory": "8Gi"}}},
                    {"name": "logger"},
                ],
                "tolerations": [
                    {
                        "key": f"node.kubernetes.io/{trouble}",
                        "operator": "Exists",
                        "effect": "NoExecute",
                        "tolerationSeconds": 300,
                    }
                    for trouble in ("not-ready", "unreachable")
                ],
            },
            "status": {"phase": "Pending", "qosClass": "Burstable"},
        }

    @property
    def status(self) -> Json:
        found: Json = self.raw["status"]
        return found

    def says(self, *conditions: Json) -> Self:
        """Set these conditions, each replacing the one of its type."""
        kinds = {found["type"] for found in conditions}
        kept = [found for found in self.status.get("conditions", []) if found["type"] not in kinds]
        self.status["conditions"] = [*kept, *conditions]
        return self

    def unschedulable(self, message: str, reason: str = "Unschedulable") -> Self:
        return self.says(
            condition("PodScheduled", False, SCHEDULED, reason=reason, message=message)
        )

    def starting(self) -> Self:
        """Place the pod on its node, with its containers not yet begun."""
        self.raw["spec"]["nodeName"] = "node-a"
        self.status["initContainerStatuses"] = [
            container(name, waiting("PodInitializing"))
            for name in ("elasticjob-launcher", "fetch", "elasticjob-agent")
        ]
        self.status["containerStatuses"] = [
            container(name, waiting("PodInitializing")) for name in ("trainer", "logger")
        ]
        return self.says(
            condition("PodScheduled", True, SCHEDULED),
            condition("Initialized", False, SCHEDULED, reason="ContainersNotInitialized"),
            condition("Ready", False, SCHEDULED, reason="ContainersNotReady", message=NOT_READY),
        )

    def prepared(self) -> Self:
        """Complete the init containers and start the agent."""
        return (
            self.starting()
            .has("elasticjob-launcher", terminated(0, since=SCHEDULED, ended=PREPARED))
            .has("fetch", terminated(0, since=SCHEDULED, ended=PREPARED))
            .has("elasticjob-agent", running(PREPARED))
            .says(condition("Initialized", True, PREPARED))
        )

    def runs(self) -> Self:
        """Start all containers; the agent is not yet a member."""
        self.prepared().has("trainer", running()).has("logger", running())
        self.status["phase"] = "Running"
        return self

    def ready(self) -> Self:
        return self.runs().says(condition("Ready", True, READY))

    def has(self, name: str, state: Json, **more: Any) -> Self:
        """Set the state of this container."""
        for field in ("initContainerStatuses", "containerStatuses"):
            for found in self.status[field]:
                if found["name"] == name:
                    found.update(container(name, state, **more))
        return self

    def unready(self, since: datetime = ENDED) -> Self:
        """Make the pod not Ready from this time on."""
        return self.says(condition("Ready", False, since, reason="ContainersNotReady"))

    def phase(self, phase: str, **more: str) -> Self:
        self.status.update(phase=phase, **more)
        return self

    def deleted(self) -> Self:
        self.raw["metadata"]["deletionTimestamp"] = when(ago(1))
        self.raw["metadata"]["deletionGracePeriodSeconds"] = 30
        return self

    def disrupted(self, reason: str, message: str) -> Self:
        return self.says(condition("DisruptionTarget", True, ENDED, reason=reason, message=message))

    def tolerates(self, **toleration: Any) -> Self:
        self.raw["spec"]["tolerations"].append(toleration)
        return self


def node(ready: str = "True", unschedulable: bool = False, taints: tuple[Json, ...] = ()) -> Json:
    """Return a Node object; `ready` is the status of its condition."""
    cordon = {"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}
    all_taints = [*copy.deepcopy(taints), *([cordon] if unschedulable else [])]
    return {
        "metadata": {"name": "node-a"},
        "spec": {"podCIDR": "10.244.1.0/24"}
        | ({"unschedulable": True} if unschedulable else {})
        | ({"taints": all_taints} if all_taints else {}),
        "status": {
            "conditions": [
                {"type": "MemoryPressure", "status": "False"},
                {"type": "Ready", "status": ready, "reason": "KubeletReady"},
            ]
        },
    }
