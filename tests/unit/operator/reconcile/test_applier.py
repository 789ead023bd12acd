"""Application of a plan on fake ports."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest

from elasticjob_operator.domain.manifests.owned_objects import Access
from elasticjob_operator.domain.manifests.pod import PodSettings
from elasticjob_operator.domain.observed.state import Observation, Obstacle, Refusal, StopReason
from elasticjob_operator.domain.plan.actions import (
    Action,
    CloseRendezvous,
    CreatePod,
    DeletePod,
    DeleteReason,
    RemoveMembers,
    WriteNodes,
    WriteParams,
)
from elasticjob_operator.domain.plan.closing_checkpoint import OPEN
from elasticjob_operator.domain.plan.planner import plan, plan_end
from elasticjob_operator.etcd_tls.job_users import SecretMissing, access_of_author
from elasticjob_operator.kubernetes.client import (
    SERVICES,
    AlreadyExists,
    Conflict,
    Forbidden,
    Invalid,
    Json,
    Kind,
    KubeError,
    NotFound,
    TooManyRequests,
    Unreachable,
)
from elasticjob_operator.metrics import Metrics
from elasticjob_operator.model import ElasticJob, Phase
from elasticjob_operator.reconcile.cluster import Applied, NameTaken, ReconcileContext
from elasticjob_operator.reconcile.job_memory import JobKey, JobMemory, OwnedMemory
from elasticjob_operator.reconcile.kube_cluster import (
    MAX_CONCURRENT_CALLS,
    PODS_SECONDS,
    KubeCluster,
)
from elasticjob_operator.reconcile.plan_pass import Applier
from elasticjob_operator.reconcile.refusals import refusal_of_pod
from elasticjob_operator.reconcile.workqueue import Retry
from elasticjob_operator.rendezvous.sources import RendezvousSource, UnusableSource
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from tests.unit.operator.builders import NOW, job, observed
from tests.unit.operator.rendezvous.fake_source import FakeSource

BEFORE = Refusal(Obstacle.QUOTA, "exceeded quota", NOW)


@dataclass
class Api:
    """API server; `holder` is the pod that has the name of every new one. It removes the owner
    references of new pods if `disowned`, and their deletion takes forever if `undeletable`. A write
    of a pod takes `delay` seconds, `seconds` is the time."""

    taken: bool = False
    delay: float = 0.0
    seconds: float = 0.0
    errors: dict[str, KubeError] = field(default_factory=dict)
    deleted: list[str] = field(default_factory=list)
    holder: Json | None = None
    created: list[Json] = field(default_factory=list)
    disowned: bool = False
    undeletable: bool = False

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json:
        if self.holder is None:
            raise NotFound(f"get {kind.plural}", f"{kind.plural} {name} not found")
        return self.holder

    async def create(
        self, kind: Kind, namespace: str | None, body: Json, *, strict: bool = False
    ) -> Json:
        if self.taken:
            raise AlreadyExists(f"create {kind.plural}", "it already exists")
        self.created.append(body)
        self.seconds += self.delay
        uid = f"uid-{len(self.created)}"
        made = {**body, "metadata": {**body["metadata"], "uid": uid}}
        if self.disowned:
            del made["metadata"]["ownerReferences"]
            self.holder = made if self.undeletable else None
        return made

    async def delete(self, kind: Kind, namespace: str | None, name: str, *, uid: str) -> bool:
        if name in self.errors:
            self.seconds += self.delay
            raise self.errors[name]
        self.deleted.append(name)
        self.seconds += self.delay
        return True

    async def patch(
        self, kind: Kind, namespace: str | None, name: str, body: Json, *, subresource: str = ""
    ) -> Json:
        if name in self.errors:
            raise self.errors[name]
        return body


@dataclass
class Owned:
    """Objects that pods need; `error` fails them. `ensured` counts the calls."""

    error: NameTaken | KubeError | None = None
    ensured: int = 0

    async def ensure(
        self,
        job: ElasticJob,
        memory: JobMemory,
        source: RendezvousSource,
        *,
        needed: bool,
        renew: bool,
    ) -> None:
        self.ensured += 1
        if self.error is not None:
            raise self.error

    async def ensure_budget(self, job: ElasticJob, memory: JobMemory, ready: int) -> None: ...


def apply(
    *actions: Action,
    api: Api | None = None,
    owned: Owned | None = None,
    source: RendezvousSource | None = None,
    refusal: Refusal | None = None,
    memory: JobMemory | None = None,
) -> Applied:
    api = api or Api()
    cluster = KubeCluster(
        api,
        owned or Owned(),
        PodSettings("sidecar:1"),
        Metrics(),
        lambda: NOW,
        lambda: api.seconds,
    )
    applier = Applier(cluster, lambda: NOW)
    memory = memory or JobMemory(JobKey("default", "job"), "job-uid", refusal=refusal)
    memory.owned = OwnedMemory(Access(b"k", None, None, None))
    wanted = job()
    context = ReconcileContext(wanted, memory, source or FakeSource(), Observation(observed()))
    planned = replace(plan(wanted, observed(), NOW), actions=actions, bounds=RendezvousParams(1, 2))
    return asyncio.run(applier.apply(context, planned))


MADE = CreatePod(0, "job-0", 1)


def test_pod_name_that_became_free_is_tried_again() -> None:
    """The end of a foreign pod triggers no reconcile."""
    applied = apply(MADE, api=Api(taken=True))
    assert isinstance(applied.error, Retry)
    assert applied.foreign == set()


def test_pod_name_of_another_owner_is_reported() -> None:
    applied = apply(MADE, api=Api(taken=True, holder={"metadata": {"name": "job-0"}}))
    assert (applied.foreign, applied.predecessors) == ({0}, set())
    assert applied.unlisted == set()
    assert applied.refused


def test_pod_of_a_deleted_job_of_the_same_name_is_reported_as_such() -> None:
    owner = {"uid": "other-uid", "controller": True, "kind": "ElasticJob", "name": "job"}
    held = {"metadata": {"name": "job-0", "ownerReferences": [owner]}}
    applied = apply(MADE, api=Api(taken=True, holder=held))
    assert (applied.foreign, applied.predecessors) == ({0}, {0})


def test_pod_of_the_job_that_no_list_showed_is_reported() -> None:
    owner = {"uid": "job-uid", "controller": True, "kind": "ElasticJob"}
    held = {"metadata": {"name": "job-0", "ownerReferences": [owner]}}
    applied = apply(MADE, api=Api(taken=True, holder=held))
    assert isinstance(applied.error, Retry)
    assert applied.unlisted == {"job-0"}
    assert applied.foreign == set()


def test_created_pods_end_a_refusal() -> None:
    api = Api()
    applied = apply(MADE, api=api, refusal=BEFORE)
    assert applied.refusal is None
    assert [body["metadata"]["name"] for body in api.created] == ["job-0"]


def test_refusal_ends_once_no_pod_is_wanted() -> None:
    assert apply(refusal=BEFORE).refusal is None


@pytest.mark.parametrize("actions", [(), (MADE,)], ids=["no pod wanted", "a pod wanted"])
def test_unusable_store_keeps_its_refusal(actions: tuple[Action, ...]) -> None:
    api, owned = Api(), Owned()
    applied = apply(*actions, api=api, owned=owned, source=UnusableSource(), refusal=BEFORE)
    assert applied.refusal == BEFORE
    assert applied.refused is bool(actions)
    assert api.created == []
    assert owned.ensured == 0


@pytest.mark.parametrize("actions", [(), (MADE,)], ids=["later", "before a pod"])
def test_taken_name_of_an_owned_object_refuses_pods(actions: tuple[Action, ...]) -> None:
    applied = apply(*actions, owned=Owned(NameTaken(SERVICES, "job")))
    assert applied.refused is bool(actions)
    assert isinstance(applied.error, NameTaken) is not bool(actions)
    assert applied.refusal is not None
    assert applied.refusal.obstacle is Obstacle.NAME_CONFLICT


def test_missing_secret_of_the_author_refuses_pods() -> None:
    async def read(kind: Kind, namespace: str, name: str) -> Json:
        raise NotFound("get", f"secrets {name} not found")

    author = job(rendezvous={"endpoints": ["http://etcd:2379"], "secretName": "etcd"})
    with pytest.raises(SecretMissing) as missing:
        asyncio.run(access_of_author(read, author, Access(b"k", None, None, None)))
    applied = apply(MADE, owned=Owned(missing.value))
    assert applied.refused
    assert applied.refusal is not None
    assert (applied.refusal.obstacle, applied.refusal.message) == (
        Obstacle.SECRET, "spec.rendezvous.secretName: there must be a Secret etcd in default"
    )  # fmt: skip
    running = apply(owned=Owned(missing.value))
    assert running.error is missing.value
    assert running.refusal is None, "its pods have the credentials"


@pytest.mark.parametrize(
    ("message", "obstacle"),
    [
        ('admission webhook "v.example" denied the request: no', Obstacle.REFUSED),
        (
            "pods \"job-0\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied "
            "request: no",
            Obstacle.REFUSED,
        ),
        ('Pod "job-0" is invalid: spec.containers[0].image: Required', Obstacle.TEMPLATE_INVALID),
        (
            'Pod "job-0" is invalid: x: Invalid value: "admission webhook "v""',
            Obstacle.TEMPLATE_INVALID,
        ),
        ('strict decoding error: unknown field "spec.hostnam"', Obstacle.TEMPLATE_INVALID),
    ],
)
@pytest.mark.parametrize("status", [400, 422])
def test_denial_by_policy_or_webhook_is_no_fault_of_the_template(
    message: str, obstacle: Obstacle, status: int
) -> None:
    error = Invalid("create pods default/job-0", message, status)
    assert refusal_of_pod(error, {"spec": {"containers": []}}) == (obstacle, message)


def test_rendezvous_is_written_through_its_source() -> None:
    source, entered = FakeSource(), observed(bounds=RendezvousParams(1, 2))
    stopped = plan_end(job(), entered, Phase.RUNNING, StopReason.SUSPENDED, NOW, OPEN)
    [closing] = stopped.actions
    assert isinstance(closing, CloseRendezvous)
    applied = apply(
        WriteParams(1, RendezvousParams(1, 2)), closing, RemoveMembers(1, ("u1",)), source=source
    )
    assert source.writes == ["bounds", "close", "remove"]
    assert len(applied.actions) == 3
    assert applied.error is None


@pytest.mark.parametrize(
    ("error", "is_refused"),
    [
        (Forbidden("patch", "denied", 403), True),
        (Invalid("patch", "denied", 422), True),
        (Conflict("patch", "denied", 409), False),
        (TooManyRequests("patch", "denied", 429), False),
        (Unreachable("patch", "denied", 500), False),
    ],
)
def test_only_a_lasting_refusal_of_the_size_lets_the_plan_go_on(
    error: KubeError, is_refused: bool
) -> None:
    applied = apply(WriteNodes(4), MADE, api=Api(errors={"job": error}))
    assert applied.actions == ([MADE] if is_refused else [])
    assert applied.nodes_refused == ("denied" if is_refused else None)
    assert applied.error is (None if is_refused else error)


def test_pods_that_lose_their_owner_at_creation_are_deleted_and_created_ever_later() -> None:
    api, memory = Api(disowned=True), JobMemory(JobKey("default", "job"), "job-uid")
    times: list[float] = []
    while len(times) < 8:
        before = len(api.created)
        applied = apply(*CREATIONS, api=api, memory=memory)
        assert (applied.refused, applied.error, applied.created) == (True, None, [])
        assert applied.refusal is not None
        assert applied.refusal.obstacle is Obstacle.OWNER_REMOVED
        memory.refusal = applied.refusal
        times += [api.seconds] * (len(api.created) - before)
        assert len(api.deleted) == len(api.created)
        api.seconds += 1
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses == [2, 4, 8, 16, 32, 60, 60]
    assert set(api.deleted) == {"job-0"}
    api.disowned = False
    api.seconds += 60
    applied = apply(*CREATIONS, api=api, memory=memory)
    assert (len(applied.created), applied.refusal) == (MANY, None)


def test_withdrawn_pod_is_waited_for() -> None:
    api = Api(disowned=True, undeletable=True)
    memory = JobMemory(JobKey("default", "job"), "job-uid")
    for _ in range(3):
        assert apply(*CREATIONS, api=api, memory=memory).refused
        api.seconds += 1000
    assert len(api.created) == 1
    assert len(api.deleted) == 3, "the deletion is repeated until it has begun"
    assert memory.withdrawn.pods == {"uid-1": "job-0"}


def test_refused_deletion_of_a_withdrawn_pod_does_not_end_the_plan() -> None:
    denied = Forbidden("delete pods job-0", "denied", 403)
    api = Api(disowned=True, undeletable=True, errors={"job-0": denied})
    memory, other = JobMemory(JobKey("default", "job"), "job-uid"), DELETIONS[-1]
    for _ in range(2):
        applied = apply(MADE, other, api=api, memory=memory)
        assert (applied.error, applied.refused, applied.actions) == (None, True, [other])
    assert len(api.created) == 1


MANY = 4 * MAX_CONCURRENT_CALLS
CREATIONS = tuple(CreatePod(index, f"job-{index}", 1) for index in range(MANY))
DELETIONS = tuple(
    DeletePod(f"job-{index}", f"uid-{index}", DeleteReason.MARKED) for index in range(MANY)
)


@pytest.mark.parametrize("actions", [CREATIONS, DELETIONS], ids=["creations", "deletions"])
def test_slow_writes_of_pods_are_left_after_a_while(actions: tuple[Action, ...]) -> None:
    """The status is then written, and the next reconcile continues: no reconcile of a large job
    lasts long, which the liveness probe would take for a fault."""
    api = Api(delay=PODS_SECONDS / MAX_CONCURRENT_CALLS)
    applied = apply(*actions, RemoveMembers(1, ("u1",)), api=api)
    done = len(api.created) + len(api.deleted)
    assert MAX_CONCURRENT_CALLS <= done <= 2 * MAX_CONCURRENT_CALLS + 1
    assert (applied.unfinished, applied.error, applied.refused) == (True, None, False)
    assert len(applied.actions) == done, "nor is any later action applied"


def test_slow_first_creation_does_not_leave_one_pod_to_each_reconcile() -> None:
    """As with an admission webhook that is ignored after its timeout."""
    api = Api(delay=2 * PODS_SECONDS)
    applied = apply(*CREATIONS, api=api)
    assert (applied.unfinished, len(api.created)) == (True, 1 + MAX_CONCURRENT_CALLS)


@pytest.mark.parametrize("actions", [CREATIONS, DELETIONS], ids=["creations", "deletions"])
def test_fast_writes_of_pods_are_completed(actions: tuple[Action, ...]) -> None:
    applied = apply(*actions)
    assert (applied.unfinished, len(applied.actions)) == (False, MANY)


def test_pods_that_may_not_be_deleted_do_not_keep_the_others() -> None:
    """Each pass begins with the same pods."""
    protected = [f"job-{index}" for index in range(2 * MAX_CONCURRENT_CALLS)]
    errors = {name: Forbidden(f"delete pods {name}", "denied", 403) for name in protected}
    api = Api(errors=dict(errors))
    applied = apply(*DELETIONS, api=api)
    assert applied.error is errors["job-0"]
    assert sorted(applied.kept) == sorted(protected)
    assert len(api.deleted) == len(applied.actions) == MANY - len(protected)


def test_pods_whose_deletion_was_refused_are_deleted_last() -> None:
    """A slow refusal of a webhook leaves no time for the others."""
    first = [one.name for one in DELETIONS[:MAX_CONCURRENT_CALLS]]
    errors = {name: Forbidden(f"delete pods {name}", "denied", 403) for name in first}
    api = Api(errors=dict(errors), delay=2 * PODS_SECONDS / MAX_CONCURRENT_CALLS)
    memory = JobMemory(JobKey("default", "job"), "job-uid")
    applied = apply(*DELETIONS, api=api, memory=memory)
    assert (applied.unfinished, api.deleted) == (True, [])
    for passes in range(1, 4):
        left = [one for one in DELETIONS if one.name not in api.deleted]
        applied = apply(*left, api=api, memory=memory)
        assert len(api.deleted) == passes * MAX_CONCURRENT_CALLS
    assert not set(first) & set(api.deleted)
    assert memory.undeletable.keys() == {one.uid for one in DELETIONS[:MAX_CONCURRENT_CALLS]}


def test_server_without_an_answer_ends_the_deletions() -> None:
    error = Unreachable("delete pods job-0", "no answer")
    api = Api(errors={"job-0": error})
    assert apply(*DELETIONS, api=api).error is error
    assert len(api.deleted) == MAX_CONCURRENT_CALLS - 1
