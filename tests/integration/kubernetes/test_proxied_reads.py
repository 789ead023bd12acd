"""Reads of the end-to-end tests through `kubectl proxy`, on a real API server."""

from __future__ import annotations

import os

import pytest

from tests.cluster.programs import programs
from tests.e2e.api import NOT_FOUND, Api, Refused, served
from tests.integration.apiserver import ApiServer
from tests.integration.kube_helpers import pod


def names(found: list[dict[str, dict[str, str]]]) -> list[str]:
    return [each["metadata"]["name"] for each in found]


def test_objects_are_found_selected_and_annotated(api_server: ApiServer, namespace: str) -> None:
    program, kubeconfig = programs("kubernetes") / "kubectl", api_server.kubeconfig()
    api_server.request("POST", f"/api/v1/namespaces/{namespace}/pods", pod("one"))
    with served((str(program), "--kubeconfig", str(kubeconfig)), os.environ) as api:
        assert names(api.items("pods", namespace)) == ["one"]
        found = api.items("pods", labels="app=training", fields=f"metadata.namespace={namespace}")
        assert names(found) == ["one"]
        assert api.items("pods", namespace, labels="app=other") == []
        assert api.items("elasticjobs", namespace) == []
        assert api.find("namespaces", namespace) is not None
        assert api.find("pods", "two", namespace) is None
        api.annotate("pods", "one", namespace, **{"e2e/seen": "1"})
        changed = api.find("pods", "one", namespace) or {}
        assert changed["metadata"]["annotations"] == {"e2e/seen": "1"}
        assert api.log(namespace, "one", {"container": "trainer"}) == ""
        with pytest.raises(Refused, match="container other is not valid"):
            api.log(namespace, "one", {"container": "other"})
        with pytest.raises(Refused, match="requested resource") as refusal:
            api.items("pods/one/no-such-subresource", namespace)
        assert refusal.value.status == NOT_FOUND
        address = api.address
    with pytest.raises(Refused, match="Connection refused") as refusal:
        Api(address).find("pods", "one", namespace)
    assert refusal.value.status == 0
