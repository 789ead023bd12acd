"""Check of templates: the builder's refusals and the rules of the API server, all at once."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from elasticjob_operator.domain.manifests.pod_rules.fields import (
    CONFIG_KEY,
    DNS_LABEL,
    DNS_SUBDOMAIN,
    LABEL_VALUE,
    PORT_NAME,
    QUALIFIED_NAME,
    Format,
    quantity,
)
from elasticjob_operator.domain.manifests.template_check import check_pods
from elasticjob_operator.model import parse_manifest
from tests.unit.operator.builders import manifest

Json = dict[str, Any]
TRAINER: Json = {"name": "trainer", "image": "t:1", "command": ["python3", "train.py"]}
POD = "spec.template.spec"


def found(spec: Json | None = None, trainer: Json | None = None, **job: Any) -> dict[str, str]:
    """Return message by path."""
    template = {"spec": {"containers": [{**TRAINER, **(trainer or {})}], **(spec or {})}}
    problems = check_pods(parse_manifest(manifest(template=template, **job)))
    return {problem.path: problem.message for problem in problems}


def test_sound_template_has_no_problem() -> None:
    assert found() == {}


def test_text_with_half_of_a_surrogate_pair_is_a_problem() -> None:
    text = "must not contain an unpaired surrogate; got '\\ud800'"
    document = manifest(template={"spec": {"containers": [TRAINER]}})
    document["metadata"]["annotations"] = {"a": "\ud800", "\udc00": "b"}
    problems = check_pods(parse_manifest(document))
    messages = {problem.path: problem.message for problem in problems}
    assert messages["metadata.annotations.a"] == text
    assert "must not have keys with" in messages["metadata.annotations"]


def test_conflicts_with_the_operator_and_faults_for_the_api_server_are_listed_together() -> None:
    spec = {"hostname": "x", "volumes": [{"name": "elasticjob"}, {"name": "a", "secret": {}}]}
    trainer = {
        "image": None,
        "command": ["mpirun", "-np", "2", "python3", "train.py"],
        "env": [{"name": "ELASTICJOB_SOCKET", "value": "x"}],
        "volumeMounts": [{"name": "b", "mountPath": "/elasticjob"}],
    }
    at = f"{POD}.containers[0]"
    assert set(found(spec, trainer)) == {
        f"{POD}.hostname",
        f"{POD}.volumes[0].name",
        f"{POD}.volumes[1].secret.secretName",
        f"{at}.image",
        f"{at}.command",
        f"{at}.env[0].name",
        f"{at}.volumeMounts[0].name",
        f"{at}.volumeMounts[0].mountPath",
    }


def test_refusals_of_the_builder_are_found() -> None:
    assert (
        "fixed ports"
        in found({"hostNetwork": True}, rendezvous={"backend": "C10d"})[f"{POD}.hostNetwork"]
    )
    policy = {"schedulingPolicy": {"priorityClass": "high"}}
    assert f"{POD}.priorityClassName" in found({"priorityClassName": "low"}, runPolicy=policy)


@pytest.mark.parametrize("named", [{}, {"priorityClassName": ""}], ids=["absent", "empty"])
@pytest.mark.parametrize("field", [{"preemptionPolicy": "Never"}, {"priority": 10}])
def test_priority_class_of_the_run_policy_counts_without_one_in_the_template(
    named: Json, field: Json
) -> None:
    policy = {"schedulingPolicy": {"priorityClass": "polite"}}
    assert found({**named, **field}, runPolicy=policy) == {}
    assert [*found({**named, **field})] == [f"{POD}.{next(iter(field))}"]


def test_message_names_the_volumes_that_exist() -> None:
    spec = {"volumes": [{"name": "data"}, {"name": "cache"}]}
    mounts = {"volumeMounts": [{"name": "dat", "mountPath": "/data"}]}
    (message,) = found(spec, mounts).values()
    assert message == "must be the name of a volume; got 'dat', volumes are: cache, data"


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("2", "2"),
        ("500m", "0.5"),
        ("4Gi", str(4 * 2**30)),
        ("1e3", "1000"),
        ("1E", str(10**18)),
        ("1E3", "1000"),
        ("+.5k", "500"),
        ("-1", "-1"),
        (3, "3"),
        ("1n", "0.000000001"),
    ],
)
def test_quantities_have_their_amount(text: object, amount: str) -> None:
    assert quantity(text) == Decimal(amount)


@pytest.mark.parametrize(
    ("form", "valid", "invalid"),
    [
        (DNS_LABEL, ["a", "a-1", "0"], ["", "-a", "a-", "A", "a.b", "a" * 64, "a\n"]),
        (DNS_SUBDOMAIN, ["a.b", "a-b.c"], ["", "a..b", ".a", "a.", "A"]),
        (LABEL_VALUE, ["", "a", "A_b.c-1"], ["-a", "a-", "a b", "a" * 64]),
        (QUALIFIED_NAME, ["a", "A.b_c", "x.io/A"], ["", "/a", "a/b/c", "X/a", "a" * 64, "a/"]),
        (PORT_NAME, ["web", "a-1"], ["", "80", "WEB", "a--b", "-a", "a" * 16]),
        (CONFIG_KEY, ["a.b", ".a", "A_b-c"], ["", ".", "..", "..a", "a/b"]),
    ],
)
def test_formats(form: Format, valid: list[str], invalid: list[str]) -> None:
    assert [text for text in valid if not form.fits(text)] == []
    assert [text for text in invalid if form.fits(text)] == []
