"""Replacement of etcd's certificates, including the authority, during an undisturbed training."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable

import pytest

from elasticjob_operator.domain.manifests import names
from elasticjob_operator.domain.manifests.owned_objects import CA
from tests.e2e.console import CALL_POLL_SECONDS, Json, until
from tests.e2e.installation import ETCD_POD, SYSTEM, Installation
from tests.e2e.job_namespace import JobNamespace
from tests.e2e.manifests import counting, job

pytestmark = pytest.mark.timeout(600, func_only=True)

NAME = "trusting"
SECRET = "elasticjob-etcd"
RENEWAL = "cronjob/elasticjob-certificates"
ONCE = "certificates-now"
BEGIN = b"-----BEGIN CERTIFICATE-----"


def data_of(secret: Json | None, key: str) -> bytes:
    return base64.b64decode(((secret or {}).get("data") or {}).get(key, ""))


def read_again(installation: Installation, ns: JobNamespace, pods: Iterable[str]) -> None:
    """Make the kubelets read the Secrets of these pods now, instead of within a minute or two."""
    system = JobNamespace(installation.console, SYSTEM)
    for pod in [*(each["metadata"]["name"] for each in installation.operators()), ETCD_POD]:
        system.look_again(pod)
    for pod in pods:
        ns.look_again(pod)


def renew(installation: Installation) -> str:
    """Run the chart's daily renewal; return its output."""
    console = installation.console
    console.kubectl("-n", SYSTEM, "create", "job", ONCE, f"--from={RENEWAL}")
    try:
        console.kubectl(
            "-n", SYSTEM, "wait", "--for=condition=Complete", "--timeout=120s", f"job/{ONCE}",
            seconds=130,
        )  # fmt: skip
        return console.kubectl("-n", SYSTEM, "logs", f"job/{ONCE}")
    finally:
        console.kubectl("-n", SYSTEM, "delete", "job", ONCE)


def test_new_authority_is_trusted_beside_the_old_one(
    ns: JobNamespace, installation: Installation
) -> None:
    console = installation.console
    ns.apply(job(NAME, counting(), nodes=2))
    before = ns.running(NAME, 2)
    workers = {step.pod: step.pid for step in ns.steps(NAME, tail=5)}
    old = data_of(console.api.find("secrets", SECRET, SYSTEM), CA)

    # Without its key the authority cannot sign: the next one must take over at once.
    lost = json.dumps([{"op": "remove", "path": "/data/ca.key"}])
    console.kubectl(
        "-n", SYSTEM, "patch", "secret", f"{SECRET}-authority", "--type=json", "-p", lost
    )
    assert "made a certificate authority" in renew(installation)
    bundle = data_of(console.api.find("secrets", SECRET, SYSTEM), CA)
    assert old.strip() in bundle, "what was signed by the old one is trusted until it expires"
    assert bundle.count(BEGIN) == old.count(BEGIN) + 1

    def everywhere() -> bool:
        read_again(installation, ns, workers)
        if data_of(ns.find("secrets", f"{NAME}-elasticjob"), CA) != bundle:
            return False
        script = f"print(open('{names.ACCESS_PATH}/{CA}').read().count('BEGIN'))"
        return all(
            ns.kubectl("exec", pod, "-c", "elasticjob-agent", "--", "python", "-c", script)
            == f"{bundle.count(BEGIN)}\n"
            for pod in workers
        )

    until(everywhere, "the bundle to reach the agents", 150, CALL_POLL_SECONDS)
    console.kubectl("-n", SYSTEM, "delete", "pod", ETCD_POD)  # all connections are made anew
    installation.ready()
    ns.advances(NAME, ns.latest(NAME) + 20)
    assert {step.pod: step.pid for step in ns.steps(NAME, tail=5)} == workers
    after = ns.running(NAME, 2)
    assert after["rendezvous"]["round"] == before["rendezvous"]["round"]
    ns.kill_worker(f"{NAME}-0")
    ns.running(NAME, 2, after=after["rendezvous"]["round"])
    assert "nothing is due" in renew(installation)
