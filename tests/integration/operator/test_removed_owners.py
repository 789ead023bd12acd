"""Pods whose owner references are removed, on a real API server: neither many pods nor a leak."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.integration.etcd_server import EtcdServer, wait_until
from tests.integration.operator.admission import admission_policy, patching, rule
from tests.integration.operator.agent_records import running
from tests.integration.operator.single_operator import ns, operator
from tests.integration.operator.test_pod_labels import label, stays
from tests.integration.operator_rig import SECONDS, Namespace, Operator

__all__ = ["ns", "operator"]

WATCH_SECONDS = 6
"""Duration of a watch; the pauses after three creations add up to more."""


@contextmanager
def removing_owners(ns: Namespace, plural: str = "pods", held: bool = False) -> Iterator[None]:
    """Let admission remove the owner references of new objects of this kind, and add a finalizer
    if `held`."""
    patches = ['JSONPatch{op: "remove", path: "/metadata/ownerReferences"}']
    if held:
        patches.append('JSONPatch{op: "add", path: "/metadata/finalizers", value: ["test.dev/a"]}')
    owned = [{"name": "owned", "expression": "has(object.metadata.ownerReferences)"}]
    where = rule("", plural, "CREATE")
    with admission_policy(ns, "Mutating", where, matchConditions=owned, **patching(*patches)):
        wait_until(lambda: not is_kept(ns, plural), "the policy", SECONDS)
        yield
    wait_until(lambda: is_kept(ns, plural), "the end of the policy", SECONDS)


def is_kept(ns: Namespace, plural: str) -> bool:
    """Return True if the API server keeps the owner reference of a new object."""
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "none", "uid": "none"}
    spec: dict[str, Any] = {"clusterIP": "None"}
    if plural == "pods":
        spec = {"containers": [{"name": "c", "image": "i:1"}]}
    probe = {"metadata": {"name": "probe", "ownerReferences": [owner]}, "spec": spec}
    made = ns.server.request("POST", f"{ns.path(plural)}?dryRun=All", probe)
    return "ownerReferences" in made["metadata"]


def unown(ns: Namespace, *names: str) -> None:
    for name in names:
        ns.server.patch(ns.path("pods", name), {"metadata": {"ownerReferences": None}})


def version(ns: Namespace) -> str:
    found: str = ns.server.request("GET", ns.path("pods"))["metadata"]["resourceVersion"]
    return found


def created_since(ns: Namespace, since: str) -> list[str]:
    """Return the names of the pods created from this version on to the end of a watch."""
    query = f"watch=1&resourceVersion={since}&timeoutSeconds={WATCH_SECONDS}"
    lines = ns.server.fetch("GET", f"{ns.path('pods')}?{query}").splitlines()
    events = [json.loads(line) for line in lines]
    return [one["object"]["metadata"]["name"] for one in events if one["type"] == "ADDED"]


def test_pods_without_owner_at_creation_are_few_and_deleted(
    ns: Namespace, operator: Operator
) -> None:
    with removing_owners(ns):
        since = version(ns)
        ns.create_job(minNodes=1, maxNodes=2)
        found = ns.await_condition("PodsReady", "OwnerReferencesRemoved")
        for words in ("metadata.ownerReferences from job-0", "exclude pods with the label"):
            assert words in found["message"]
        ns.await_event("OwnerReferencesRemoved", found["message"])
        assert any("mutatingwebhookconfigurations" in text for text in ns.status()["explanation"])
        made = created_since(ns, since)
        assert 1 <= len(made) <= 3
        assert set(made) == {"job-0"}
        wait_until(lambda: not ns.pods(), "the deletion of the pod", SECONDS)
        assert operator.metric("elasticjob_pods_created_total") == 0
    ns.await_pods("job-0", "job-1")
    ns.await_condition("PodsReady", "PodsStarting")
    assert all(raw["metadata"]["ownerReferences"] for raw in ns.all("pods"))


def test_withdrawn_pod_that_stays_is_neither_used_nor_followed_by_another(ns: Namespace) -> None:
    with removing_owners(ns, held=True):
        ns.create_job(minNodes=1, maxNodes=2)
        ns.await_condition("PodsReady", "OwnerReferencesRemoved")
    stays(ns, "job-0")
    assert ns.status()["pods"]["active"] == 0
    assert ns.condition("NameConflict") == {}
    uid = ns.present("pods", "job-0")["metadata"]["uid"]
    ns.server.patch(ns.path("pods", "job-0"), {"metadata": {"finalizers": None}})
    ns.await_pods("job-0", "job-1")
    assert ns.present("pods", "job-0")["metadata"]["uid"] != uid
    ns.await_status(pods=2)


def test_service_without_owner_is_reported(ns: Namespace) -> None:
    with removing_owners(ns, "services"):
        ns.create_job(minNodes=1, maxNodes=2)
        found = ns.await_condition("PodsReady", "OwnerReferencesRemoved")
        assert "metadata.ownerReferences was removed from service job" in found["message"]
        assert ns.pods() == []
    ns.server.request("DELETE", ns.path("services", "job"))
    ns.await_pods("job-0", "job-1")


def test_pods_that_another_controller_takes_over_have_no_successors(ns: Namespace) -> None:
    ns.create_job(minNodes=1, maxNodes=2)
    ns.await_pods("job-0", "job-1")
    ns.await_status(pods=2)
    since = version(ns)
    other = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "a", "uid": "a"}
    owners = {"metadata": {"ownerReferences": [{**other, "controller": True}]}}
    for name in ("job-0", "job-1"):
        ns.server.patch(ns.path("pods", name), owners)
    begin = "job-0 and job-1 have lost the job's entry in metadata.ownerReferences: "
    wait_until(
        lambda: any(text.startswith(begin) for text in ns.status()["explanation"]),
        "the sentence",
        SECONDS,
    )
    assert created_since(ns, since) == []
    assert ns.condition("NameConflict") == {}
    ns.patch_job({"spec": {"runPolicy": {"suspend": True}}})
    ns.await_pods()


def test_training_pods_that_lose_their_owner_stay_and_end_with_the_job(
    ns: Namespace, newest_etcd: EtcdServer, operator: Operator
) -> None:
    agents = running(ns, newest_etcd, 2)
    since = version(ns)
    unown(ns, "job-1")
    label(ns, "job-1", **{"elasticjob.dev/job-uid": None})

    def told(begin: str) -> list[str]:
        return [text for text in ns.status().get("explanation") or () if text.startswith(begin)]

    lost = "job-1 has lost the job's entry in metadata.ownerReferences: "
    wait_until(lambda: told(lost) != [], "the sentence", SECONDS)
    [command] = told("`kubectl patch pod job-1 --type merge --patch '{")
    wait_until(
        lambda: any(reason == "OwnerReferencesLost" for reason, _ in ns.events()),
        "the event",
        SECONDS,
    )
    operator.kill()
    unown(ns, "job-0")
    operator.start()
    both = "job-0 and job-1 have lost the job's entry in metadata.ownerReferences: "
    wait_until(lambda: told(both) != [], "the sentence on both", SECONDS)
    assert created_since(ns, since) == []
    assert newest_etcd.ctl("get", "--prefix", agents.keys.sessions(agents.members["job-1"]))
    assert (ns.status()["pods"]["active"], ns.status()["phase"]) == (2, "Running")
    ns.server.patch(ns.path("pods", "job-1"), json.loads(command.split("'")[1]))
    wait_until(lambda: told(lost.replace("job-1", "job-0")) != [], "one sentence", SECONDS)
    unown(ns, "job-1")
    wait_until(lambda: told(both) != [], "the sentence on both again", SECONDS)
    ns.server.request("DELETE", ns.path("elasticjobs", "job"))
    ns.await_pods()
