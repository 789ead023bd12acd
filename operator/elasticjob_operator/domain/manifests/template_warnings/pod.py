"""Warnings for the fields of a pod as a whole."""

from __future__ import annotations

from collections.abc import Iterator

from elasticjob_operator.domain.json_object import Json
from elasticjob_operator.domain.manifests.names import JOB_LABEL, SHM_PATH, pod_labels
from elasticjob_operator.domain.manifests.template_rules import is_same
from elasticjob_operator.domain.manifests.template_warnings.template import (
    UNREADY,
    Found,
    Template,
    WarningKind,
    mapping,
    mappings,
)
from elasticjob_operator.domain.plan.lifecycle import MARGIN_SECONDS
from elasticjob_operator.model.problems import Location


def host_ipc(template: Template) -> Iterator[Found]:
    if template.spec.get("hostIPC") is not True:
        return
    mounts = mappings(template.trainer.get("volumeMounts"))
    if any(is_same(mount.get("mountPath"), SHM_PATH) for mount in mounts):
        effect = f"its volume at {SHM_PATH} hides the machine's from the trainer"
    else:
        effect = (
            f"the trainer gets the machine's {SHM_PATH} instead of a volume of its own, with the "
            "machine's limit, and files that outlive the pod"
        )
    yield (
        WarningKind.HOST_IPC,
        ("hostIPC",),
        f"{effect}; remove it unless workers share memory with processes outside the pod",
    )


_QUEUE_NAMES = {
    "volcano": (
        "annotations",
        ("scheduling.k8s.io/group-name", "scheduling.volcano.sh/group-name"),
        ("scheduling.volcano.sh/queue-name",),
    ),
    "scheduler-plugins-scheduler": ("labels", ("scheduling.x-k8s.io/pod-group",), ()),
    "coscheduling": ("labels", ("scheduling.x-k8s.io/pod-group",), ()),
    "kai-scheduler": ("labels", (), ("kai.scheduler/queue", "runai/queue")),
    "yunikorn": ("labels", (), ("queue",)),
}
"""Labels or annotations that name the group, and those that name the queue, by the name under
which a scheduler is usually installed. One of them suffices: a PodGroup has its queue."""
_OTHER_PLACES = {"yunikorn": ("annotations", "yunikorn.apache.org/queue")}


def scheduler(template: Template) -> Iterator[Found]:
    name = template.spec.get("schedulerName")
    if not isinstance(name, str) or name not in _QUEUE_NAMES:
        return
    place, groups, queues = _QUEUE_NAMES[name]
    given = mapping(template.metadata.get(place))
    other_place, other = _OTHER_PLACES.get(name, (place, ""))
    if any(given.get(key) for key in (*groups, *queues)):
        return
    if mapping(template.metadata.get(other_place)).get(other):
        return
    missing = "its pod group" if not queues else "its queue" if not groups else "a group or queue"
    effect = (
        f"{name} places each pod by itself"
        if groups
        else f"{name} places the pods in its default queue, or not at all"
    )
    key = (*queues, *groups)[0]
    yield (
        WarningKind.SCHEDULER_WITHOUT_QUEUE,
        ("schedulerName",),
        f"{missing} is not named: {effect}; set {key} in template.metadata.{place}, or remove "
        "schedulerName",
    )


LEAST_MARGIN_SECONDS = 10
"""Time beyond the workers' own grace period below which a warning is due, in seconds: an agent may
take 6 s to leave. The default period adds `MARGIN_SECONDS`."""


def grace(template: Template) -> Iterator[Found]:
    given = template.job.spec.template.spec.termination_grace_period_seconds
    stop = template.job.spec.recovery.stop_grace_seconds
    if given is not None and given < stop + LEAST_MARGIN_SECONDS:
        yield (
            WarningKind.GRACE_TOO_SHORT,
            ("terminationGracePeriodSeconds",),
            f"{given} s are less than recovery.stopGraceSeconds ({stop} s) and "
            f"{LEAST_MARGIN_SECONDS} s for saving and leaving: workers may be killed before they "
            f"have saved; set {stop + MARGIN_SECONDS} or more, or remove it",
        )


def pod_deadline(template: Template) -> Iterator[Found]:
    seconds = template.spec.get("activeDeadlineSeconds")
    if seconds is not None:
        yield (
            WarningKind.POD_DEADLINE,
            ("activeDeadlineSeconds",),
            f"each pod is killed after {seconds} s and replaced, and the job goes on; limit the "
            "job with spec.runPolicy.activeDeadlineSeconds instead",
        )


def readiness_gates(template: Template) -> Iterator[Found]:
    if template.spec.get("readinessGates"):
        yield (
            WarningKind.READINESS_GATES,
            ("readinessGates",),
            f"training does not wait for them, and {UNREADY}; remove them",
        )


def labels(template: Template) -> Iterator[Found]:
    own = pod_labels(template.job, 0, 0)
    for name in mapping(template.metadata.get("labels")):
        if name in own:
            yield (
                WarningKind.LABEL_REPLACED,
                ("..", "metadata", "labels", name),
                f"{name} is set by the operator, which finds its pods by it; remove it",
            )


def selectors(template: Template) -> Iterator[Found]:
    """Yield terms without a selector, which match no pod; an empty selector matches all."""
    terms: list[tuple[Location, Json]] = [
        (("topologySpreadConstraints", index), one)
        for index, one in enumerate(mappings(template.spec.get("topologySpreadConstraints")))
    ]
    affinity = mapping(template.spec.get("affinity"))
    for kind in ("podAffinity", "podAntiAffinity"):
        for when in ("required", "preferred"):
            field = f"{when}DuringSchedulingIgnoredDuringExecution"
            for index, one in enumerate(mappings(mapping(affinity.get(kind)).get(field))):
                at: Location = ("affinity", kind, field, index)
                weighted = when == "preferred"
                term = mapping(one.get("podAffinityTerm")) if weighted else one
                terms.append(((*at, "podAffinityTerm") if weighted else at, term))
    for place, term in terms:
        if term and term.get("labelSelector") is None:
            yield (
                WarningKind.SELECTOR_MISSING,
                place,
                "without labelSelector it counts no pod and has no effect; select the pods of the "
                f"job by the label {JOB_LABEL}",
            )
