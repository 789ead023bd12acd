"""Client of the API server, call by call and refusal by refusal, on a real one."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from kubernetes.aio.config import incluster_config

from elasticjob_operator.kubernetes import requests
from elasticjob_operator.kubernetes.client import (
    BUDGETS,
    ELASTICJOBS,
    LEASES,
    NODES,
    PODS,
    SECRETS,
    SERVICES,
    AlreadyExists,
    Conflict,
    Forbidden,
    Invalid,
    Kind,
    Kube,
    KubeError,
    NoSuchKind,
    NotFound,
    QuotaExceeded,
    TooLarge,
    TooManyObjects,
    Unauthorized,
    Unreachable,
)
from tests.integration.apiserver import NOBODY, ApiServer
from tests.integration.kube_helpers import Json, elasticjob, pod, run

OTHER_UID = "4b2ee1f0-0000-4000-8000-000000000000"


def secret(name: str, **metadata: object) -> Json:
    return {"metadata": {"name": name, **metadata}, "stringData": {"a": "1", "b": "2"}}


def test_created_object_is_returned_as_stored(api_server: ApiServer, namespace: str) -> None:
    async def scenario(kube: Kube) -> None:
        created = await kube.create(ELASTICJOBS, namespace, elasticjob())
        assert created["metadata"]["uid"]
        assert created["spec"]["rendezvous"]["keepAliveSeconds"] == 5, "defaults are filled in"
        assert await kube.get(ELASTICJOBS, namespace, "job") == created

    run(api_server, scenario)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (PODS, pod("x")),
        (SECRETS, secret("x")),
        (SERVICES, {"metadata": {"name": "x"}, "spec": {"clusterIP": "None"}}),
        (BUDGETS, {"metadata": {"name": "x"}, "spec": {"minAvailable": 1}}),
        (LEASES, {"metadata": {"name": "x"}, "spec": {"holderIdentity": "me"}}),
    ],
    ids=lambda value: value.plural if isinstance(value, Kind) else "",
)
def test_every_kind_has_path(api_server: ApiServer, namespace: str, kind: Kind, body: Json) -> None:
    async def scenario(kube: Kube) -> None:
        created = await kube.create(kind, namespace, body, strict=True)
        assert [found["metadata"]["uid"] for found in await kube.list(kind, namespace)] == [
            created["metadata"]["uid"]
        ]

    run(api_server, scenario)


def test_cluster_scoped_kind_has_path(api_server: ApiServer) -> None:
    async def scenario(kube: Kube) -> None:
        await kube.create(NODES, None, {"metadata": {"name": "machine"}})
        assert (await kube.get(NODES, None, "machine"))["metadata"]["name"] == "machine"
        assert "machine" in [found["metadata"]["name"] for found in await kube.list(NODES)]

    run(api_server, scenario)


# --- reading


def test_absent_object_and_unknown_kind_raise_different_errors(
    api_server: ApiServer, namespace: str
) -> None:
    async def scenario(kube: Kube) -> None:
        with pytest.raises(NotFound, match=f'^get pods {namespace}/x: pods "x" not found$'):
            await kube.get(PODS, namespace, "x")
        for unknown in (Kind("elasticjob.dev", "v1", "elasticjobs"), Kind("", "v1", "podz")):
            with pytest.raises(NoSuchKind):
                await kube.get(unknown, namespace, "x")
            with pytest.raises(NoSuchKind):
                await kube.list(unknown)

    run(api_server, scenario)


def test_list_returns_every_page(api_server: ApiServer, namespace: str) -> None:
    async def scenario(kube: Kube) -> None:
        names = [f"s-{number}" for number in range(7)]
        for name in names:
            await kube.create(
                SECRETS, namespace, secret(name, labels={"odd": str(name[-1] in "135")})
            )
        everything = await kube.list(SECRETS, namespace, page_size=3)
        assert [one["metadata"]["name"] for one in everything] == names
        odd = "odd=True,odd!=False"
        found = await kube.list(SECRETS, namespace, selector=odd, page_size=3)
        assert [one["metadata"]["name"] for one in found] == ["s-1", "s-3", "s-5"]
        everywhere = [one["metadata"]["namespace"] for one in await kube.list(SECRETS, page_size=3)]
        assert everywhere.count(namespace) == 7
        assert await kube.list(SECRETS, namespace, selector="odd=perhaps") == []

    run(api_server, scenario)


def test_list_reads_large_objects_in_smaller_pages(
    api_server: ApiServer, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_BODY_BYTES", 64 << 10)

    async def scenario(kube: Kube) -> None:
        names = [f"s-{number}" for number in range(9)]
        for name in names:
            await kube.create(SECRETS, namespace, secret(name, annotations={"a": "x" * 20_000}))
        kept = await kube.list(SECRETS, namespace, keep=lambda one: {"n": one["metadata"]["name"]})
        assert kept == [{"n": name} for name in names]
        with pytest.raises(TooManyObjects, match="more than 8 objects match"):
            await kube.list(SECRETS, namespace, most=8)
        monkeypatch.setattr(requests, "MAX_BODY_BYTES", 1 << 10)
        with pytest.raises(TooLarge):
            await kube.list(SECRETS, namespace)

    run(api_server, scenario)


def test_metadata_list_contains_metadata_only(api_server: ApiServer, namespace: str) -> None:
    async def scenario(kube: Kube) -> None:
        for name in ("a", "b"):
            await kube.create(ELASTICJOBS, namespace, elasticjob(name))
        found = await kube.list(ELASTICJOBS, namespace, metadata_only=True, page_size=1)
        assert [one["metadata"]["name"] for one in found] == ["a", "b"]
        assert all("spec" not in one and one["metadata"]["uid"] for one in found)

    run(api_server, scenario)


# --- creating


def test_existing_name_is_conflict(api_server: ApiServer, namespace: str) -> None:
    async def scenario(kube: Kube) -> None:
        await kube.create(PODS, namespace, pod("x"))
        with pytest.raises(AlreadyExists, match=f'create pods {namespace}/x: pods "x" already'):
            await kube.create(PODS, namespace, pod("x"))

    run(api_server, scenario)


def test_absent_namespace_is_not_found(api_server: ApiServer) -> None:
    async def scenario(kube: Kube) -> None:
        with pytest.raises(NotFound, match='namespaces "nowhere" not found'):
            await kube.create(PODS, "nowhere", pod("x"))

    run(api_server, scenario)


def test_dry_run_stores_nothing(api_server: ApiServer, namespace: str) -> None:
    async def scenario(kube: Kube) -> None:
        found = await kube.create(PODS, namespace, pod("x"), dry_run=True, strict=True)
        assert found["spec"]["dnsPolicy"] == "ClusterFirst", "as it would be"
        assert await kube.list(PODS, namespace) == []

    run(api_server, scenario)


def test_strict_validation_finds_pod_typo(api_server: ApiServer, namespace: str) -> None:
    async def scenario(kube: Kube) -> None:
        typo = pod("x", restartPolice="Never")
        with pytest.raises(Invalid, match=r'unknown field "spec\.restartPolice"') as found:
            await kube.create(PODS, namespace, typo, dry_run=True, strict=True)
        assert found.value.status == 400
        await kube.create(PODS, namespace, typo)

    run(api_server, scenario)


def test_invalid_object_error_lists_fields(api_server: ApiServer, namespace: str) -> None:
    async def scenario(kube: Kube) -> None:
        wrong = pod("x", restartPolicy="Perhaps", dnsPolicy="Never")
        with pytest.raises(Invalid) as found:
            await kube.create(PODS, namespace, wrong)
        assert {cause.field for cause in found.value.causes} == {
            "spec.restartPolicy",
            "spec.dnsPolicy",
        }
        assert (found.value.status, found.value.reason) == (422, "Invalid")
        with pytest.raises(Invalid, match=r"spec\.maxNodes: .*must be at least minNodes"):
            await kube.create(ELASTICJOBS, namespace, elasticjob(minNodes=5))

    run(api_server, scenario)


def test_oversized_object_is_invalid(api_server: ApiServer, namespace: str) -> None:
    async def scenario(kube: Kube) -> None:
        large = secret("x", annotations={"a": "x" * 300_000})
        with pytest.raises(Invalid, match=r"metadata\.annotations: Too long"):
            await kube.create(SECRETS, namespace, large)

    run(api_server, scenario)


# --- changing


def test_merge_patch_sets_and_removes_fields(api_server: ApiServer, namespace: str) -> None:
    async def scenario(kube: Kube) -> None:
        await kube.create(SECRETS, namespace, secret("x", labels={"keep": "1", "drop": "1"}))
        patch = {"metadata": {"labels": {"drop": None, "new": "2"}}}
        changed = await kube.patch(SECRETS, namespace, "x", patch)
        assert changed["metadata"]["labels"] == {"keep": "1", "new": "2"}
        assert await kube.get(SECRETS, namespace, "x") == changed

    run(api_server, scenario)


def test_patch_of_replaced_or_changed_object_is_conflict(
    api_server: ApiServer, namespace: str
) -> None:
    async def scenario(kube: Kube) -> None:
        created = await kube.create(ELASTICJOBS, namespace, elasticjob())
        uid, version = created["metadata"]["uid"], created["metadata"]["resourceVersion"]
        precondition = {"uid": uid, "resourceVersion": version}

        async def patch(phase: str, metadata: Json) -> Json:
            body = {"metadata": metadata, "status": {"phase": phase}}
            return await kube.patch(ELASTICJOBS, namespace, "job", body, subresource="status")

        assert (await patch("Running", precondition))["status"]["phase"] == "Running"
        with pytest.raises(Conflict, match="has been modified"):
            await patch("Failed", precondition)
        with pytest.raises(Conflict, match="has been modified"):
            await patch("Failed", precondition | {"uid": OTHER_UID})
        with pytest.raises(ValueError, match="resourceVersion must come with uid"):
            await patch("Failed", {"uid": uid})
        assert (await kube.get(ELASTICJOBS, namespace, "job"))["status"]["phase"] == "Running"

    run(api_server, scenario)


def test_patch_honours_uid_precondition(api_server: ApiServer, namespace: str) -> None:
    async def scenario(kube: Kube) -> None:
        for kind, body in ((ELASTICJOBS, elasticjob("x")), (PODS, pod("x"))):
            uid = (await kube.create(kind, namespace, body))["metadata"]["uid"]
            labels = {"labels": {"a": "b"}}
            with pytest.raises(Conflict):
                await kube.patch(kind, namespace, "x", {"metadata": labels | {"uid": OTHER_UID}})
            changed = await kube.patch(kind, namespace, "x", {"metadata": labels | {"uid": uid}})
            assert changed["metadata"]["labels"]["a"] == "b"

    run(api_server, scenario)


def test_scale_patch_honours_resource_version(api_server: ApiServer, namespace: str) -> None:
    async def scenario(kube: Kube) -> None:
        metadata = (await kube.create(ELASTICJOBS, namespace, elasticjob()))["metadata"]
        seen = {"uid": metadata["uid"], "resourceVersion": metadata["resourceVersion"]}

        async def scale(replicas: int) -> Json:
            body = {"metadata": seen, "spec": {"replicas": replicas}}
            return await kube.patch(ELASTICJOBS, namespace, "job", body, subresource="scale")

        assert (await scale(3))["spec"]["replicas"] == 3
        with pytest.raises(Conflict):
            await scale(2)
        assert (await kube.get(ELASTICJOBS, namespace, "job"))["spec"]["nodes"] == 3

    run(api_server, scenario)


def test_patch_of_absent_object_creates_nothing(api_server: ApiServer, namespace: str) -> None:
    async def scenario(kube: Kube) -> None:
        with pytest.raises(NotFound):
            await kube.patch(PODS, namespace, "x", {"metadata": {"labels": {"a": "b"}}})
        body = {"metadata": {"uid": OTHER_UID, "resourceVersion": "1"}, "status": {}}
        with pytest.raises(NotFound):
            await kube.patch(ELASTICJOBS, namespace, "x", body, subresource="status")

    run(api_server, scenario)


# --- deleting


def test_delete_with_uid_keeps_replacement_object(api_server: ApiServer, namespace: str) -> None:
    async def scenario(kube: Kube) -> None:
        first = await kube.create(SECRETS, namespace, secret("x"))
        uid = first["metadata"]["uid"]
        assert await kube.delete(SECRETS, namespace, "x", uid=uid)
        assert not await kube.delete(SECRETS, namespace, "x", uid=uid), "it is gone"
        second = await kube.create(SECRETS, namespace, secret("x"))
        assert not await kube.delete(SECRETS, namespace, "x", uid=uid), "it is another"
        version = second["metadata"]["resourceVersion"]
        assert not await kube.delete(SECRETS, namespace, "x", uid=uid, resource_version=version)
        assert await kube.get(SECRETS, namespace, "x") == second

    run(api_server, scenario)


def test_delete_with_resource_version_keeps_changed_object(
    api_server: ApiServer, namespace: str
) -> None:
    async def scenario(kube: Kube) -> None:
        first = await kube.create(SECRETS, namespace, secret("x"))
        uid, version = first["metadata"]["uid"], first["metadata"]["resourceVersion"]
        second = await kube.patch(SECRETS, namespace, "x", {"metadata": {"labels": {"a": "b"}}})
        with pytest.raises(Conflict):
            await kube.delete(SECRETS, namespace, "x", uid=uid, resource_version=version)
        version = second["metadata"]["resourceVersion"]
        assert await kube.delete(SECRETS, namespace, "x", uid=uid, resource_version=version)

    run(api_server, scenario)


def test_pod_is_deleted_with_its_own_grace_period(api_server: ApiServer, namespace: str) -> None:
    async def scenario(kube: Kube) -> None:
        body = pod("x", nodeName="machine", terminationGracePeriodSeconds=77)
        uid = (await kube.create(PODS, namespace, body))["metadata"]["uid"]
        assert await kube.delete(PODS, namespace, "x", uid=uid)
        found = (await kube.get(PODS, namespace, "x"))["metadata"]
        assert (found["uid"], found["deletionGracePeriodSeconds"]) == (uid, 77)

    run(api_server, scenario)


# --- missing permissions


def test_unauthorized_request_is_forbidden(api_server: ApiServer, namespace: str) -> None:
    async def scenario(kube: Kube) -> None:
        with pytest.raises(Forbidden, match=f'User "{NOBODY}" cannot list resource "pods"'):
            await kube.list(PODS, namespace)
        with pytest.raises(Forbidden) as found:
            await kube.create(PODS, namespace, pod("x"))
        assert not isinstance(found.value, QuotaExceeded)
        with pytest.raises(Forbidden):
            await kube.patch(PODS, namespace, "x", {"metadata": {"labels": {"a": "b"}}})
        with pytest.raises(Forbidden):
            await kube.delete(PODS, namespace, "x", uid="uid")

    run(api_server, scenario, user=NOBODY)


def test_role_permits_only_its_verbs(api_server: ApiServer, namespace: str) -> None:
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["create"]}
    api_server.request("POST", f"{rbac}/roles", {"metadata": {"name": "r"}, "rules": [rule]})
    binding = {
        "metadata": {"name": "r"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "r"},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": NOBODY}],
    }
    api_server.request("POST", f"{rbac}/rolebindings", binding)

    async def scenario(kube: Kube) -> None:
        async with asyncio.timeout(60):
            while True:  # the server's own view of roles lags a little
                try:
                    await kube.create(PODS, namespace, pod("x"))
                    break
                except Forbidden:
                    await asyncio.sleep(0.05)
        with pytest.raises(Forbidden, match='cannot get resource "pods"'):
            await kube.get(PODS, namespace, "x")

    run(api_server, scenario, user=NOBODY)


def test_exhausted_quota_differs_from_other_refusals(api_server: ApiServer, namespace: str) -> None:
    # There is no quota controller, so the test writes the status; admission counts on by itself.
    path = f"/api/v1/namespaces/{namespace}/resourcequotas"
    hard = {"pods": "1"}
    api_server.request("POST", path, {"metadata": {"name": "few"}, "spec": {"hard": hard}})
    api_server.patch(f"{path}/few/status", {"status": {"hard": hard, "used": {"pods": "0"}}})

    async def scenario(kube: Kube) -> None:
        async with asyncio.timeout(60):
            created = 0
            while True:  # admission's view of the quota lags a little
                try:
                    await kube.create(PODS, namespace, pod(f"x-{created}"))
                    created += 1
                except QuotaExceeded as error:
                    if "exceeded quota" in error.message:
                        break
                await asyncio.sleep(0.05)
        assert created == 1
        with pytest.raises(QuotaExceeded, match=r"exceeded quota: few, requested: pods=1"):
            await kube.create(PODS, namespace, pod("y"))
        with pytest.raises(QuotaExceeded):
            await kube.create(PODS, namespace, pod("y"), dry_run=True)

    run(api_server, scenario)


def test_pod_that_violates_pod_security_is_forbidden(api_server: ApiServer, namespace: str) -> None:
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    api_server.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": label}})

    async def scenario(kube: Kube) -> None:
        with pytest.raises(Forbidden, match=r'violates PodSecurity "restricted:latest"') as found:
            await kube.create(PODS, namespace, pod("x"))
        assert not isinstance(found.value, QuotaExceeded)

    run(api_server, scenario)


def test_invalid_credentials_are_refused(api_server: ApiServer, tmp_path: Path) -> None:
    document = yaml.safe_load(api_server.kubeconfig().read_text())
    document["users"][0]["user"]["token"] = "stale"
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(document))

    async def main() -> None:
        async with Kube.connect(kubeconfig) as kube:
            with pytest.raises(Unauthorized):
                await kube.list(PODS)

    asyncio.run(main())


# --- connecting


def open_sockets() -> int:
    links = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return sum(link.startswith("socket:") for link in links)


@pytest.mark.parametrize("verb", ["get", "create"])
def test_server_without_timely_answer_is_unreachable(
    api_server: ApiServer, namespace: str, verb: str
) -> None:
    async def scenario(kube: Kube) -> None:
        before = open_sockets()
        # Over an existing connection: asyncio may leak one whose TLS handshake is cancelled.
        assert await kube.list(PODS, namespace) == []
        calls = {
            "get": lambda: kube.get(PODS, namespace, "x"),
            "create": lambda: kube.create(PODS, namespace, pod("x")),
        }
        api_server.pause()
        try:
            with pytest.raises(Unreachable, match=r"no answer from https://.* in 2 s"):
                await calls[verb]()
            async with asyncio.timeout(60):
                while open_sockets() > before:  # although the server does not end its TLS session
                    await asyncio.sleep(0.02)
        finally:
            api_server.resume()

    run(api_server, scenario, call_seconds=2.0)


def test_selected_kubeconfig_context_is_used(api_server: ApiServer, tmp_path: Path) -> None:
    document = yaml.safe_load(api_server.kubeconfig().read_text())
    document["contexts"].append({"name": "good", "context": document["contexts"][0]["context"]})
    document["contexts"][0]["context"] = {"cluster": "none", "user": "none"}
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(document))

    async def main() -> None:
        async with Kube.connect(kubeconfig, "good") as kube:
            assert await kube.get(Kind("", "v1", "namespaces", namespaced=False), None, "default")
        for context in (None, "absent"):
            with pytest.raises(KubeError, match="no usable configuration"):
                async with Kube.connect(kubeconfig, context):
                    pass

    asyncio.run(main())


def test_missing_kubeconfig_is_reported(tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(KubeError, match=f"no usable configuration: {tmp_path}/absent is"):
            async with Kube.connect(tmp_path / "absent"):
                pass

    asyncio.run(main())


def test_service_account_is_used_in_pod(
    api_server: ApiServer, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, _, port = api_server.url.removeprefix("https://").partition(":")
    token = tmp_path / "token"
    token.write_text("admin-token")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    ca = str(api_server.certificates.ca_file)
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", ca)

    async def main() -> None:
        async with Kube.connect() as kube:
            assert await kube.list(PODS, namespace) == []

    asyncio.run(main())


@pytest.mark.parametrize("off_seconds", [0.0, 4_000.0, -4_000.0])
def test_object_ages_use_api_server_clock(
    api_server: ApiServer, namespace: str, off_seconds: float
) -> None:
    """A new pod is new, however wrong this machine's clock is."""

    async def main() -> None:
        began = time.time()
        wrong = Kube.connect(api_server.kubeconfig(), wall_clock=lambda: time.time() + off_seconds)
        async with wrong as kube:
            await kube.list(PODS, namespace)
            made = await kube.create(PODS, namespace, pod("new"))
            age = kube.now() - datetime.fromisoformat(made["metadata"]["creationTimestamp"])
            # Both times are truncated to a second.
            assert -1.0 <= age.total_seconds() <= 2.0 + time.time() - began
            assert abs(kube.now().timestamp() - time.time()) <= 1.0 + time.time() - began

    asyncio.run(main())
