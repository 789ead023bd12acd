"""Parsing of Pod and Node objects, case by case."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from elasticjob_operator.domain.manifests.names import INDEX_LABEL
from elasticjob_operator.domain.observed.container_state import MAX_MESSAGE
from elasticjob_operator.domain.observed.node_state import Node, parse_node
from elasticjob_operator.domain.observed.pod_state import (
    observed_pod,
    pod_of,
    used_fields,
    without_members,
)
from elasticjob_operator.domain.observed.state import NodeState, Obstacle, Pod, PodEnd, PodPhase
from elasticjob_rendezvous.protocol.worker_group import STUCK_EXIT_CODE
from tests.unit.operator.builders import ago, job
from tests.unit.operator.domain.observed.raw_pods import (
    CREATED,
    ENDED,
    NOT_READY,
    SCHEDULED,
    STARTED,
    RawPod,
    condition,
    node,
    running,
    start_error,
    terminated,
    waiting,
)

GOOD = {"node-a": parse_node(node())}
RUNC = (
    "failed to create containerd task: failed to create shim task: OCI runtime create failed: "
    "runc create failed: unable to start container process: error during container init: "
)
IN_USE = {"key": "team", "value": "vision", "effect": "NoSchedule"}


def read(pod: RawPod, nodes: dict[str, Node] | None = None) -> Pod:
    known = GOOD if nodes is None else nodes
    found = observed_pod(pod.raw, "trainer", known)
    assert observed_pod(used_fields(pod.raw), "trainer", known) == found
    assert found is not None
    return found


def failed(pod: RawPod) -> RawPod:
    return pod.unready().phase("Failed")


def test_new_pod_is_pending_without_obstacle() -> None:
    assert read(RawPod()) == Pod(index=2, name="job-2", uid="uid-2-0", created_at=CREATED)


def test_pod_being_prepared_is_pending_on_its_node() -> None:
    for pod in (RawPod().starting(), RawPod().prepared()):
        found = read(pod)
        assert found.phase is PodPhase.PENDING
        assert (found.node, found.launcher_since, found.obstacle) == ("node-a", None, None)


def test_pod_with_running_trainer_has_a_launcher_before_ready() -> None:
    found = read(RawPod().runs())
    assert (found.phase, found.launcher_since, found.ready) == (PodPhase.RUNNING, STARTED, False)
    assert read(RawPod().ready()).ready


def test_running_trainer_without_a_start_time_has_a_launcher_since_the_creation() -> None:
    """As a virtual kubelet may report it: the API server writes null."""
    found = read(RawPod().runs().has("trainer", {"running": {"startedAt": None}}))
    assert (found.phase, found.launcher_since) == (PodPhase.RUNNING, CREATED)


def test_running_trainer_beside_failing_container_is_a_running_pod() -> None:
    found = read(RawPod().runs().has("logger", waiting("ImagePullBackOff")).phase("Pending"))
    assert (found.phase, found.obstacle) == (PodPhase.RUNNING, None)


@pytest.mark.parametrize("name", ["job", "job-", "job-x", "job-1.5", "job-²", "job-" + "9" * 60])
def test_pod_without_index_does_not_belong_to_the_job(name: str) -> None:
    pod = RawPod()
    pod.raw["metadata"]["name"] = name
    assert observed_pod(pod.raw, "trainer", GOOD) is None


@pytest.mark.parametrize("labels", [{}, {INDEX_LABEL: "7"}, None])
def test_pod_keeps_its_index_without_labels(
    labels: dict[str, str] | None,
) -> None:
    pod = RawPod()
    pod.raw["metadata"]["labels"] = labels
    found = observed_pod(pod.raw, "trainer", GOOD)
    assert found is not None
    assert found.index == 2


# --- preparation

SANDBOX = "PodReadyToStartContainers"


@pytest.mark.parametrize(
    ("pod", "preparing"),
    [
        pytest.param(RawPod(), False, id="not scheduled"),
        pytest.param(RawPod().unschedulable("no room"), False, id="unschedulable"),
        pytest.param(RawPod().starting(), True, id="containers wait"),
        pytest.param(
            RawPod().starting().says(condition(SANDBOX, True, SCHEDULED)), True, id="sandbox"
        ),
        pytest.param(
            RawPod().starting().says(condition(SANDBOX, False, SCHEDULED)),
            False,
            id="volumes cannot be mounted",
        ),
        pytest.param(
            RawPod().starting().has("elasticjob-launcher", waiting("ContainerCreating")),
            True,
            id="sidecar image is pulled",
        ),
        pytest.param(RawPod().starting().has("fetch", running()), True, id="init container runs"),
        pytest.param(
            RawPod().starting().has("fetch", running(), lastState=terminated(1)),
            False,
            id="init container runs again after a failure",
        ),
        pytest.param(
            RawPod().prepared().has("trainer", waiting("ContainerCreating")),
            True,
            id="trainer image is pulled",
        ),
        pytest.param(RawPod().prepared().has("trainer", waiting("Pulling")), True, id="pulling"),
        *(
            pytest.param(RawPod().prepared().has("trainer", waiting(reason)), False, id=reason)
            for reason in (
                "ErrImagePull",
                "ImagePullBackOff",
                "InvalidImageName",
                "CreateContainerConfigError",
                "CreateContainerError",
                "CrashLoopBackOff",
                "SomethingNew",
            )
        ),
        pytest.param(
            RawPod().starting().has("fetch", waiting("ImagePullBackOff")),
            False,
            id="image of an init container is missing",
        ),
        pytest.param(RawPod().runs(), False, id="runs"),
        pytest.param(RawPod().runs().has("trainer", terminated(1)), False, id="ended"),
    ],
)
def test_pod_is_preparing_while_its_kubelet_makes_progress(pod: RawPod, preparing: bool) -> None:
    assert read(pod).preparing is preparing


# --- obstacles


@pytest.mark.parametrize(
    ("pod", "obstacle", "message"),
    [
        pytest.param(
            RawPod().unschedulable("0/3 nodes are available: 3 Insufficient cpu."),
            Obstacle.UNSCHEDULABLE,
            "0/3 nodes are available: 3 Insufficient cpu.",
            id="no room",
        ),
        pytest.param(
            RawPod().unschedulable("Scheduling is blocked", "SchedulingGated"),
            Obstacle.UNSCHEDULABLE,
            "Scheduling is blocked",
            id="scheduling gate",
        ),
        pytest.param(
            RawPod().says(condition("PodScheduled", False, SCHEDULED)),
            Obstacle.UNSCHEDULABLE,
            "no node was found for it",
            id="no room, without a word",
        ),
        pytest.param(
            RawPod().prepared().has("trainer", waiting("ErrImagePull", "not found")),
            Obstacle.IMAGE,
            "container trainer with image registry.example/trainer:1: ErrImagePull: not found",
            id="image, first try",
        ),
        pytest.param(
            RawPod()
            .prepared()
            .has(
                "trainer",
                waiting("ImagePullBackOff", 'Back-off pulling image "registry.example/trainer:1"'),
            ),
            Obstacle.IMAGE,
            "container trainer with image registry.example/trainer:1: ImagePullBackOff: "
            'Back-off pulling image "registry.example/trainer:1"',
            id="image, later tries",
        ),
        pytest.param(
            RawPod().prepared().has("trainer", waiting("InvalidImageName")),
            Obstacle.IMAGE,
            "container trainer with image registry.example/trainer:1: InvalidImageName",
            id="image name",
        ),
        pytest.param(
            RawPod().prepared().has("trainer", waiting("ErrImageNeverPull", "policy of Never")),
            Obstacle.IMAGE,
            "container trainer with image registry.example/trainer:1: ErrImageNeverPull: "
            "policy of Never",
            id="image never pulled",
        ),
        pytest.param(
            RawPod().starting().has("fetch", waiting("ImagePullBackOff", "not found")),
            Obstacle.IMAGE,
            "container fetch with image registry.example/fetch:1: ImagePullBackOff: not found",
            id="an init container's image",
        ),
        pytest.param(
            RawPod()
            .prepared()
            .has("trainer", waiting("CreateContainerConfigError", 'secret "data" not found')),
            Obstacle.CONFIG,
            'container trainer: CreateContainerConfigError: secret "data" not found',
            id="secret absent",
        ),
        pytest.param(
            RawPod().prepared().has("trainer", waiting("CreateContainerError", "name in use")),
            Obstacle.CONFIG,
            "container trainer: CreateContainerError: name in use",
            id="runtime refuses",
        ),
        pytest.param(
            RawPod().prepared().has("trainer", waiting("RunContainerError", "no such device")),
            Obstacle.CONFIG,
            "container trainer: RunContainerError: no such device",
            id="runtime cannot run it",
        ),
        pytest.param(
            RawPod().starting().has("fetch", terminated(4, message="no such bucket")),
            Obstacle.INIT,
            "init container fetch: exit code 4: no such bucket",
            id="init container failed",
        ),
        pytest.param(
            RawPod()
            .starting()
            .has(
                "elasticjob-agent",
                waiting("CrashLoopBackOff", "back-off 40s restarting failed container"),
                lastState=terminated(1, message="ELASTICJOB_ENDPOINTS must be set"),
                restartCount=3,
            ),
            Obstacle.INIT,
            "init container elasticjob-agent: exit code 1: ELASTICJOB_ENDPOINTS must be set",
            id="agent fails again and again",
        ),
        pytest.param(
            RawPod()
            .starting()
            .has("elasticjob-agent", waiting("CrashLoopBackOff"), lastState=terminated(0)),
            Obstacle.INIT,
            "init container elasticjob-agent: exit code 0",
            id="agent ends well again and again",
        ),
        pytest.param(
            RawPod()
            .starting()
            .has("elasticjob-launcher", start_error(RUNC + 'exec: "cp": permission denied')),
            Obstacle.INIT,
            "init container elasticjob-launcher: could not be started: cp: permission denied; "
            "it must be executable for the container's user",
            id="init container could not be started",
        ),
    ],
)
def test_obstacle_of_the_launcher_is_named(pod: RawPod, obstacle: Obstacle, message: str) -> None:
    found = read(pod)
    assert (found.phase, found.launcher_since) == (PodPhase.PENDING, None)
    assert (found.obstacle, found.obstacle_message) == (obstacle, message)
    assert not found.launch_failed


def test_restarted_running_init_container_is_no_obstacle() -> None:
    pod = RawPod().starting()
    pod.has("elasticjob-agent", running(), lastState=terminated(1), restartCount=1)
    assert read(pod).obstacle is None


def test_image_of_other_container_is_no_obstacle() -> None:
    pod = RawPod().prepared().has("logger", waiting("ImagePullBackOff", "not found"))
    assert read(pod).obstacle is None


def test_failing_agent_beside_running_launcher_is_no_obstacle() -> None:
    pod = RawPod().ready().unready()
    pod.has("elasticjob-agent", waiting("CrashLoopBackOff"), lastState=terminated(137, "OOMKilled"))
    found = read(pod)
    assert (found.phase, found.ready, found.obstacle) == (PodPhase.RUNNING, False, None)
    assert found.launcher_since == STARTED


@pytest.mark.parametrize(
    "changes",
    [
        {"state": terminated(STUCK_EXIT_CODE, message="process 7 waits")},
        {
            "state": running(),
            "lastState": terminated(STUCK_EXIT_CODE, message="process 7 waits"),
        },
        {
            "state": waiting("CrashLoopBackOff"),
            "lastState": terminated(STUCK_EXIT_CODE, message="process 7 waits"),
        },
    ],
)
def test_pod_is_stuck_if_its_agent_gave_up_running_workers(changes: dict[str, Any]) -> None:
    pod = RawPod().ready().unready().has("elasticjob-agent", **changes)
    assert read(pod).stuck == "process 7 waits"


def test_pod_whose_agent_failed_otherwise_is_not_stuck() -> None:
    pod = RawPod().ready().unready()
    pod.has("elasticjob-agent", waiting("CrashLoopBackOff"), lastState=terminated(1))
    assert not read(pod).stuck


def test_long_message_keeps_its_end() -> None:
    said = "x" * 5000 + " at last"
    found = read(RawPod().starting().has("fetch", terminated(1, message=said)))
    assert found.obstacle_message.endswith(" at last")
    assert len(found.obstacle_message) < MAX_MESSAGE + 100


# --- ends


@pytest.mark.parametrize(("code", "phase"), [(0, PodPhase.SUCCEEDED), (1, PodPhase.FAILED)])
def test_pod_ends_with_its_trainer_while_another_container_runs(code: int, phase: PodPhase) -> None:
    found = read(RawPod().ready().has("trainer", terminated(code)))
    assert (found.phase, found.ended, found.over, found.lingering) == (phase, True, False, True)
    assert (found.ready, found.launcher_since, found.ended_at) == (False, None, ENDED)


def test_successful_trainer_is_success_though_pod_failed() -> None:
    pod = RawPod().ready().has("trainer", terminated(0)).has("logger", terminated(9))
    found = read(failed(pod))
    assert (found.phase, found.over, found.launch_failed) == (PodPhase.SUCCEEDED, True, False)


def test_failed_trainer_is_failure_though_pod_succeeded() -> None:
    found = read(RawPod().ready().has("trainer", terminated(1)).unready().phase("Succeeded"))
    assert (found.phase, found.over, found.lingering) == (PodPhase.FAILED, True, False)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (terminated(1), "container trainer: exit code 1"),
        (terminated(3, message="no data"), "container trainer: exit code 3: no data"),
        (terminated(143), "container trainer: exit code 143 (signal 15)"),
        (
            terminated(137, "OOMKilled"),
            "container trainer: out of memory, its memory limit is 8Gi: exit code 137 (signal 9)",
        ),
        (
            terminated(137, "ContainerStatusUnknown", "The container could not be located"),
            "container trainer: exit code 137 (signal 9), ContainerStatusUnknown: "
            "The container could not be located",
        ),
    ],
)
def test_end_of_trainer_that_was_a_member(state: dict[str, Any], message: str) -> None:
    found = read(failed(RawPod().ready().has("trainer", state)))
    assert (found.phase, found.launch_failed, found.over) == (PodPhase.FAILED, False, True)
    assert found.end_message == message


def test_trainer_without_message_is_explained_by_the_agent() -> None:
    agent = terminated(1, message="round 3 failed: rank 2 of job-1: KeyError: 'lr'")
    pod = RawPod().ready().has("trainer", terminated(1)).has("elasticjob-agent", agent)
    assert read(failed(pod)).end_message == (
        "container trainer: exit code 1; "
        "elasticjob-agent: round 3 failed: rank 2 of job-1: KeyError: 'lr'"
    )
    pod.has("trainer", terminated(1, message="no data"))
    assert read(failed(pod)).end_message == "container trainer: exit code 1: no data"
    pod.has("trainer", terminated(0))
    assert read(failed(pod)).end_message == "container trainer: exit code 0"


@pytest.mark.parametrize(
    ("code", "text"),
    [(128, "128"), (143, "143 (signal 15)"), (192, "192 (signal 64)"), (255, "255")],
)
def test_exit_code_above_the_last_signal_names_none(code: int, text: str) -> None:
    """The kubelet reports 255 for a container whose end it missed, as after a reboot."""
    pod = failed(RawPod().ready().has("trainer", terminated(code)))
    assert read(pod).end_message == f"container trainer: exit code {text}"


def test_message_of_a_pod_is_printable() -> None:
    pod = RawPod().ready().has("trainer", terminated(1, message="bad\x1b]0;t\x07\u202e\nline"))
    expected = "container trainer: exit code 1: bad\\x1b]0;t\\x07\\u202e\nline"
    assert read(failed(pod)).end_message == expected


def test_out_of_memory_without_limit_is_named() -> None:
    pod = failed(RawPod().ready().has("trainer", terminated(137, "OOMKilled")))
    pod.raw["spec"]["containers"] = [{"name": "trainer"}]
    assert "out of memory, it has no memory limit" in read(pod).end_message


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            RUNC + 'exec: "python3": executable file not found in $PATH: unknown',
            "container trainer: could not be started: python3: executable file not found in $PATH; "
            "the image must have python3, or command must begin with the Python that it has",
        ),
        (
            RUNC + 'exec: "/opt/venv/bin/python": stat /opt/venv/bin/python: '
            "no such file or directory: unknown",
            "container trainer: could not be started: /opt/venv/bin/python: stat "
            "/opt/venv/bin/python: no such file or directory; the image must have "
            "/opt/venv/bin/python, or command must begin with the Python that it has",
        ),
        (
            RUNC + 'exec: "/usr/bin/python3": permission denied: unknown',
            "container trainer: could not be started: /usr/bin/python3: permission denied; "
            "it must be executable for the container's user",
        ),
        (
            RUNC + 'exec: "train.sh": executable file not found in $PATH: unknown',
            "container trainer: could not be started: train.sh: executable file not found in "
            "$PATH; the image must have train.sh",
        ),
        (
            "failed to mount /scratch: no space left on device",
            "container trainer: could not be started: failed to mount /scratch: "
            "no space left on device",
        ),
    ],
)
def test_trainer_that_could_not_start_is_launch_failure(said: str, message: str) -> None:
    found = read(failed(RawPod().prepared().has("trainer", start_error(said))))
    assert (found.phase, found.launch_failed, found.ended_at) == (PodPhase.FAILED, True, ENDED)
    assert found.end_message == message
    assert found.obstacle is None


def test_trainer_that_ended_before_ready_is_launch_failure() -> None:
    pod = RawPod().runs().has("trainer", terminated(2, message="invalid syntax")).phase("Failed")
    found = read(pod)
    assert found.launch_failed
    assert found.end_message == "container trainer: exit code 2: invalid syntax"


def test_trainer_of_a_pod_without_transition_times_that_is_not_ready_failed_at_launch() -> None:
    """Otherwise pods that crash at once would be replaced without a back-off."""
    unready = {"type": "Ready", "status": "False", "lastTransitionTime": None}
    pod = RawPod().runs().has("trainer", terminated(2)).phase("Failed").says(unready)
    assert read(pod).launch_failed


def test_failed_init_container_is_launch_failure() -> None:
    pod = RawPod().starting().has("fetch", terminated(1, message="no such bucket"))
    pod.says(condition("Ready", False, SCHEDULED, message=NOT_READY))
    found = read(pod.phase("Failed"))
    assert (found.phase, found.launch_failed) == (PodPhase.FAILED, True)
    assert found.end_message == "init container fetch: exit code 1: no such bucket"
    assert found.obstacle is None


def test_pod_rejected_by_its_node_is_launch_failure_at_that_time() -> None:
    pod = RawPod().says(condition("PodScheduled", True, SCHEDULED))
    pod.phase("Failed", reason="OutOfcpu", message="Node didn't have enough resource: cpu")
    found = read(pod)
    assert (found.launch_failed, found.rejected) == (True, True)
    assert found.ended_at == SCHEDULED
    assert found.end_message == "OutOfcpu: Node didn't have enough resource: cpu"


@pytest.mark.parametrize(
    ("reason", "rejected"),
    [
        ("OutOfnvidia.com/gpu", True),
        ("NodeShutdown", True),
        ("Evicted", True),
        ("NodeAffinity", True),
        ("UnexpectedAdmissionError", True),
        ("TopologyAffinityError", True),
        ("TaintToleration", True),
        ("NodePorts", True),
        ("DeadlineExceeded", False),
        ("SysctlForbidden", False),
        ("", False),
    ],
)
def test_pod_is_rejected_for_reasons_of_its_machine_alone(reason: str, rejected: bool) -> None:
    pod = RawPod().says(condition("PodScheduled", True, SCHEDULED)).phase("Failed", reason=reason)
    found = read(pod)
    assert (found.launch_failed, found.rejected) == (True, rejected)
    started = RawPod().ready().has("trainer", terminated(1)).phase("Failed", reason=reason)
    assert not read(started).rejected


@pytest.mark.parametrize(
    "pod",
    [
        RawPod().starting().has("fetch", running(SCHEDULED)),
        RawPod().starting().has("fetch", terminated(137)),
        RawPod().prepared(),
    ],
    ids=["runs", "ended", "all ended"],
)
def test_pod_evicted_after_an_init_container_began_is_not_rejected(pod: RawPod) -> None:
    """It may have exceeded its own limit of ephemeral storage."""
    found = read(pod.phase("Failed", reason="Evicted"))
    assert (found.launch_failed, found.rejected) == (True, False)
    disrupted = read(pod.disrupted("TerminationByKubelet", "its usage exceeds the limit"))
    assert (disrupted.launch_failed, disrupted.rejected) == (True, False)


@pytest.mark.parametrize(
    ("message", "rejected"),
    [
        ("The node was low on resource: ephemeral-storage. Threshold quantity: 10%", True),
        ("The node had condition: [DiskPressure]. ", True),
        ('Usage of EmptyDir volume "logs" exceeds the limit "64Mi". ', False),
        ("Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ", False),
    ],
)
def test_pod_evicted_for_a_shortage_of_its_machine_is_rejected_before_its_trainer_runs(
    message: str, rejected: bool
) -> None:
    pod = RawPod().starting().has("fetch", running(SCHEDULED))
    pod.disrupted("TerminationByKubelet", message).phase(
        "Failed", reason="Evicted", message=message
    )
    found = read(pod)
    assert (found.launch_failed, found.rejected) == (True, rejected)
    trained = RawPod().ready().has("trainer", terminated(137))
    assert not read(trained.phase("Failed", reason="Evicted", message=message)).rejected


@pytest.mark.parametrize("disrupted", [True, False], ids=["disrupted", "without the condition"])
def test_pod_evicted_before_a_container_began_is_rejected(disrupted: bool) -> None:
    """The kubelet adds the condition from Kubernetes 1.26 on."""
    pod = RawPod().starting().phase("Failed", reason="Evicted")
    if disrupted:
        pod.disrupted("TerminationByKubelet", "the node was low on resource: memory")
    found = read(pod)
    assert (found.launch_failed, found.rejected) == (True, True)


@pytest.mark.parametrize(("fields", "rejected"), [({}, True), ({"nodeName": "node-a"}, False)])
def test_pod_of_a_template_with_a_node_name_is_not_rejected(
    fields: dict[str, str], rejected: bool
) -> None:
    raw = RawPod().phase("Failed", reason="OutOfcpu").raw
    template = job().spec.template.model_dump(by_alias=True, exclude_none=True)
    template["spec"] |= fields
    found = pod_of(job(template=template), raw, GOOD)
    assert found is not None
    assert (found.launch_failed, found.rejected) == (True, rejected)


def test_failed_pod_without_status_ended_at_its_creation() -> None:
    found = read(RawPod().phase("Failed"))
    assert (found.ended_at, found.end_message) == (CREATED, "the trainer was not started")


def test_running_trainer_in_failed_pod_has_ended() -> None:
    pod = RawPod().ready().unready()
    pod.phase("Failed", reason="DeadlineExceeded", message="Pod was active too long")
    found = read(pod)
    assert (found.phase, found.launcher_since) == (PodPhase.FAILED, None)
    assert (found.launch_failed, found.ended_at) == (False, ENDED)


def test_pod_over_its_own_limit_names_it() -> None:
    pod = failed(RawPod().ready().has("trainer", terminated(137)))
    pod.phase("Failed", reason="Evicted", message='Usage of EmptyDir volume "logs" exceeds 64Mi ')
    assert read(pod).end_message == 'Evicted: Usage of EmptyDir volume "logs" exceeds 64Mi'


# --- deletion


def test_deleted_pod_is_terminating_and_still_runs() -> None:
    found = read(RawPod().ready().deleted())
    assert (found.terminating, found.phase, found.launcher_since) == (
        True,
        PodPhase.RUNNING,
        STARTED,
    )


def test_deleted_pod_that_ended_in_its_grace_is_no_launch_failure() -> None:
    found = read(failed(RawPod().runs().has("trainer", terminated(143))).deleted())
    assert (found.terminating, found.launch_failed) == (True, False)


def test_member_that_was_never_ready_has_no_launch_failure() -> None:
    pod = read(RawPod().runs().has("trainer", terminated(137)).phase("Failed"))
    assert pod.launch_failed
    (cleared,) = without_members([pod], {pod.uid})
    assert cleared == replace(pod, launch_failed=False)
    assert without_members([pod], {"uid-of-another"}) == (pod,)


@pytest.mark.parametrize(
    "reason", ["PreemptionByScheduler", "EvictionByEvictionAPI", "DeletionByTaintManager"]
)
def test_disrupted_pod_is_terminating_before_its_deletion(reason: str) -> None:
    found = read(RawPod().ready().disrupted(reason, "making room"))
    assert (found.terminating, found.phase) == (True, PodPhase.RUNNING)
    assert found.disruption == reason


def test_cancelled_disruption_is_ignored() -> None:
    pod = RawPod().ready().says(condition("DisruptionTarget", False, ENDED))
    assert not read(pod).terminating
    assert read(pod).disruption == ""


@pytest.mark.parametrize("member", [True, False])
def test_ended_disrupted_pod_is_no_launch_failure(member: bool) -> None:
    pod = RawPod().ready().unready() if member else RawPod().runs()
    pod.has("trainer", terminated(137)).phase("Failed", reason="Evicted", message="low on memory")
    pod.disrupted("TerminationByKubelet", "The node was low on resource: memory.")
    found = read(pod)
    assert (found.phase, found.terminating, found.launch_failed) == (PodPhase.FAILED, False, False)
    assert found.end_message == "TerminationByKubelet: The node was low on resource: memory."


def test_pod_of_removed_node_is_no_launch_failure() -> None:
    pod = RawPod().ready().unready().phase("Failed")
    pod.disrupted("DeletionByPodGC", "PodGC: node no longer exists")
    assert not read(pod).launch_failed


# --- the node


@pytest.mark.parametrize(
    ("raw", "state"),
    [
        (node(), NodeState.READY),
        (node(ready="False"), NodeState.NOT_READY),
        (node(ready="Unknown"), NodeState.NOT_READY),
        (node(ready="Unknown", unschedulable=True), NodeState.NOT_READY),
        (node(unschedulable=True), NodeState.CORDONED),
        (node(unschedulable=True, taints=(IN_USE,)), NodeState.CORDONED),
        (node(taints=(IN_USE,)), NodeState.TAINTED),
        (node(taints=(IN_USE | {"effect": "NoExecute"},)), NodeState.TAINTED),
        (node(taints=(IN_USE | {"effect": "PreferNoSchedule"},)), NodeState.READY),
        ({"metadata": {"name": "node-a"}}, NodeState.READY),
    ],
)
def test_node_state_from_conditions_and_taints(raw: dict[str, Any], state: NodeState) -> None:
    assert read(RawPod().ready(), {"node-a": parse_node(raw)}).node_state is state


@pytest.mark.parametrize(
    ("toleration", "state"),
    [
        ({"key": "team", "value": "vision", "effect": "NoSchedule"}, NodeState.READY),
        ({"key": "team", "operator": "Equal", "value": "vision"}, NodeState.READY),
        ({"key": "team", "operator": "Exists"}, NodeState.READY),
        ({"operator": "Exists"}, NodeState.READY),
        ({"operator": "Exists", "effect": "NoSchedule"}, NodeState.READY),
        ({"key": "team", "value": "speech"}, NodeState.TAINTED),
        ({"key": "team", "operator": "Exists", "effect": "NoExecute"}, NodeState.TAINTED),
        ({"key": "other", "operator": "Exists"}, NodeState.TAINTED),
        ({"value": "vision"}, NodeState.TAINTED),
    ],
)
def test_tolerated_taint_is_ignored(toleration: dict[str, Any], state: NodeState) -> None:
    nodes = {"node-a": parse_node(node(taints=(IN_USE,)))}
    assert read(RawPod().ready().tolerates(**toleration), nodes).node_state is state


def test_temporarily_tolerated_taint_counts() -> None:
    nodes = {"node-a": parse_node(node(taints=(IN_USE | {"effect": "NoExecute"},)))}
    pod = RawPod().ready().tolerates(key="team", operator="Exists", tolerationSeconds=60)
    assert read(pod, nodes).node_state is NodeState.TAINTED


def test_missing_node_is_lost_once_the_trainer_ran_on_it() -> None:
    gone = read(RawPod().ready(), {})
    assert (gone.node_state, gone.node_gone) == (NodeState.NOT_READY, True)
    for pod in (read(RawPod().starting(), {}), read(RawPod(), {})):
        assert (pod.node_state, pod.node_gone) == (NodeState.READY, False)


def test_unready_node_is_not_gone() -> None:
    found = read(RawPod().ready(), {"node-a": parse_node(node(ready="Unknown"))})
    assert (found.node_state, found.node_gone) == (NodeState.NOT_READY, False)


def test_unreadable_nodes_are_assumed_ready() -> None:
    found = observed_pod(RawPod().ready().raw, "trainer", None)
    assert found is not None
    assert found.node_state is NodeState.READY


def test_trainer_is_the_container_of_that_name() -> None:
    pod = RawPod().ready().has("logger", terminated(5, since=ago(20)))
    found = observed_pod(pod.raw, "logger", GOOD)
    assert found is not None
    assert (found.phase, found.end_message) == (PodPhase.FAILED, "container logger: exit code 5")


# --- disruptions


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        ("PreemptionByScheduler", PodEnd.PREEMPTED),
        ("EvictionByEvictionAPI", PodEnd.DRAINED),
        ("DeletionByTaintManager", PodEnd.NODE_TAINTED),
        ("DeletionByPodGC", PodEnd.NODE_LOST),
        ("TerminationByKubelet", PodEnd.EVICTED),
        ("SomethingNew", None),
    ],
)
def test_disruption_reason_gives_the_pod_end(reason: str, end: PodEnd | None) -> None:
    found = read(RawPod().ready().disrupted(reason, "making room"))
    assert found.end is end
    assert found.end_message == f"{reason}: making room"


@pytest.mark.parametrize(
    ("reason", "end"),
    [
        ("Evicted", PodEnd.EVICTED),
        ("NodeShutdown", PodEnd.EVICTED),
        ("Preempting", PodEnd.PREEMPTED),
        ("NodeLost", PodEnd.NODE_LOST),
        ("OutOfcpu", None),
    ],
)
def test_kubelet_reason_gives_the_pod_end(reason: str, end: PodEnd | None) -> None:
    pod = failed(RawPod().ready().has("trainer", terminated(137))).phase("Failed", reason=reason)
    assert read(pod).end is end


def test_out_of_memory_kill_takes_precedence() -> None:
    pod = failed(RawPod().ready().has("trainer", terminated(137, "OOMKilled")))
    assert read(pod.disrupted("EvictionByEvictionAPI", "drain")).end is PodEnd.OUT_OF_MEMORY


@pytest.mark.parametrize("code", [0, 1, 137])
def test_pod_of_ended_trainer_was_not_disrupted(code: int) -> None:
    assert read(failed(RawPod().ready().has("trainer", terminated(code)))).end is None


def test_essentials_of_a_pod_do_not_grow_with_its_template() -> None:
    pod = RawPod(0).ready()
    raw = pod.raw
    raw["metadata"] |= {"annotations": {"a": "x" * 250_000}, "managedFields": [{"a": "b"}] * 999}
    raw["metadata"]["labels"] |= {f"label-{number}": "x" for number in range(5000)}
    raw["spec"]["volumes"] = [{"name": f"v-{number}"} for number in range(5000)]
    raw["spec"]["tolerations"] = [{"key": f"k-{number}"} for number in range(5000)]
    for container in raw["spec"].get("containers", ()):
        container["args"] = ["x" * 100_000]
    kept = used_fields(raw)
    assert len(json.dumps(kept)) < 16_000
    assert observed_pod(kept, "trainer", GOOD) == observed_pod(raw, "trainer", GOOD)
    assert used_fields(kept) == kept


def test_long_message_of_the_scheduler_keeps_its_beginning() -> None:
    message = "0/5000 nodes are available: " + "1 node(s) had untolerated taint, " * 500
    found = observed_pod(RawPod().unschedulable(message).raw, "trainer", GOOD)
    assert found is not None
    assert found.obstacle_message.startswith("0/5000 nodes are available: 1 node(s)")
    assert len(found.obstacle_message) < MAX_MESSAGE + 30
