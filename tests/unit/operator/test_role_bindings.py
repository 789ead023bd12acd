"""Decisions of the binder: bindings to create and to delete."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

import pytest

from elasticjob_operator.kubernetes.client import (
    Conflict,
    Invalid,
    Kind,
    KubeError,
    QuotaExceeded,
    TooManyRequests,
    Unreachable,
)
from elasticjob_operator.replica.health import Health
from elasticjob_operator.role_bindings import (
    MANAGED_BY,
    RESYNC_SECONDS,
    RETRY_SECONDS,
    Binder,
    Changes,
    Request,
    _parsed,
    _pause_seconds,
    binding,
    due_changes,
    reconcile,
)

Json = dict[str, Any]
REQUEST = Request("role", ("system", "operator"), excluded=frozenset({"system", "kube-system"}))
WANTED = binding(REQUEST, "uid")


def namespace(name: str, **metadata: Any) -> Json:
    return {"metadata": {"name": name, **metadata}}


def existing(name: str, **changed: Any) -> Json:
    return {**WANTED, "metadata": {**WANTED["metadata"], "namespace": name}, **changed}


def other(name: str, **metadata: Any) -> Json:
    found = existing(name)
    return {**found, "metadata": {**found["metadata"], **metadata}}


THIEF = [{"kind": "ServiceAccount", "name": "thief", "namespace": "system"}]
WRONG = [
    existing("a", subjects=THIEF),
    existing("a", subjects=WANTED["subjects"] + THIEF),
    existing("a", subjects=None),
    existing("a", roleRef=WANTED["roleRef"] | {"name": "another"}),
    other("a", ownerReferences=[]),
    other("a", ownerReferences=[WANTED["metadata"]["ownerReferences"][0] | {"uid": "former"}]),
]
FOREIGN = [other("a", labels=None), other("a", labels={"app.kubernetes.io/managed-by": "me"})]


def changes(namespaces: list[Json], bindings: list[Json]) -> Changes:
    return due_changes(WANTED, namespaces, bindings, REQUEST.excluded)


def test_served_namespaces_get_a_binding_and_excepted_ones_none() -> None:
    names = ("b", "a", "system", "kube-system")
    assert changes([namespace(name) for name in names], []) == Changes(create=("a", "b"))


def test_namespace_that_is_being_deleted_gets_none() -> None:
    assert changes([namespace("a", deletionTimestamp="2026-01-01T00:00:00Z")], []) == Changes()


def test_right_binding_stays() -> None:
    assert changes([namespace("a")], [existing("a")]) == Changes()


@pytest.mark.parametrize("name", ["gone", "unlabelled", "system"])
def test_binding_of_a_namespace_that_is_not_served_is_deleted(name: str) -> None:
    served = [namespace("a"), namespace("system")]
    found = [existing("a"), existing(name)]
    assert changes(served, found) == Changes(delete=(found[1],))


@pytest.mark.parametrize("found", WRONG)
def test_binding_that_differs_is_created_anew(found: Json) -> None:
    assert changes([namespace("a")], [found]) == Changes(create=("a",), delete=(found,))


@pytest.mark.parametrize("found", FOREIGN)
def test_binding_of_another_creator_is_left_alone_and_named(found: Json) -> None:
    assert changes([namespace("a")], [found]) == Changes(foreign=("a",))
    assert changes([], [found]) == Changes()


def test_binding_has_the_operator_as_its_only_subject() -> None:
    assert WANTED["subjects"] == [
        {"kind": "ServiceAccount", "name": "operator", "namespace": "system"}
    ]
    assert WANTED["metadata"]["labels"] == MANAGED_BY


class Server:
    """API server with these namespaces and bindings, which refuses writes in one namespace."""

    def __init__(self, names: Iterable[str], bindings: Iterable[Json], error: KubeError) -> None:
        self._lists = {"namespaces": [namespace(name) for name in names]}
        self._lists["rolebindings"] = list(bindings)
        self._error = error
        self.written: list[tuple[str, str]] = []

    async def get(self, *_: object) -> Json:
        return {"metadata": {"uid": "uid"}}

    async def list(self, kind: Kind, *_: object, **__: object) -> Any:
        return self._lists[kind.plural]

    async def create(self, _: Kind, where: str, __: Json) -> None:
        self._write("create", where)

    async def delete(self, _: Kind, where: str, __: str, *, uid: str) -> None:
        self._write("delete", where)

    def _write(self, verb: str, where: str) -> None:
        if where in ("full", "old-full"):
            raise self._error
        self.written.append((verb, where))


def run(server: Server) -> dict[str, KubeError]:
    return asyncio.run(reconcile(server, REQUEST))[1]  # type: ignore[arg-type]


def test_refusal_in_one_namespace_does_not_stop_the_others() -> None:
    error = QuotaExceeded("create rolebindings full/role", "exceeded quota: count", 403)
    unserved = [other(name, uid=name) for name in ("old-a", "old-full", "old-z")]
    server = Server(("a", "full", "z"), unserved, error)
    assert run(server) == {"full": error, "old-full": error}
    assert server.written == [
        *(("delete", "old-a"), ("delete", "old-z")),
        *(("create", "a"), ("create", "z")),
    ]


def test_server_without_an_answer_ends_the_pass() -> None:
    server = Server(("a", "full", "z"), (), Unreachable("create rolebindings", "no answer"))
    with pytest.raises(Unreachable):
        run(server)
    assert server.written == [("create", "a")]


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (QuotaExceeded("create", "exceeded quota: count", 403), RESYNC_SECONDS),
        (Invalid("create", "denied by a policy", 422), RESYNC_SECONDS),
        (TooManyRequests("create", "too many requests", 429), RETRY_SECONDS),
        (Conflict("delete", "another uid", 409), RETRY_SECONDS),
        (Unreachable("create", "webhook failed", 500), RETRY_SECONDS),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, KubeError) else "",
)
def test_refusal_that_may_pass_is_tried_again_soon(
    error: KubeError, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def first_pause(waits: Coroutine[Any, Any, bool], pause: float) -> None:
        waits.close()
        pauses.append(pause)
        raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "wait_for", first_pause)
    binder = Binder(Server(("a", "full"), (), error), REQUEST, Health())  # type: ignore[arg-type]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(binder._keep())
    assert pauses == [seconds]


def test_pauses_after_refusals_that_may_pass_grow() -> None:
    refused, pauses = [Unreachable("create", "webhook failed", 500)], [RESYNC_SECONDS]
    for _ in range(7):
        pauses.append(_pause_seconds(refused, pauses[-1]))
    assert pauses[1:4] == [RETRY_SECONDS, 2 * RETRY_SECONDS, 4 * RETRY_SECONDS]
    assert pauses[-1] == RESYNC_SECONDS / 2
    assert _pause_seconds([], pauses[-1]) == RESYNC_SECONDS


def test_arguments_become_a_request() -> None:
    words = ["--cluster-role=role", "--service-account=system/operator"]
    more = ["--except=system", "--except=kube-system", "--selector=a=b,c=d"]
    found = _parsed([*words, *more])
    assert (found.role, found.account) == (REQUEST.role, REQUEST.account)
    assert (found.excluded, found.selector) == (REQUEST.excluded, "a=b,c=d")


@pytest.mark.parametrize("account", ["operator", "/operator", "system/", "a/b/c"])
def test_account_without_namespace_is_refused(
    account: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        _parsed(["--cluster-role=role", f"--service-account={account}"])
    assert refused.value.code == 2
    assert "must be NAMESPACE/NAME" in capsys.readouterr().err
