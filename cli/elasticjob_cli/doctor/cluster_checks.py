"""Checks of a cluster and of the operator in it, from gathered objects. No I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from elasticjob_cli.doctor.findings import Finding, Unread, fail, ok, unread, warn
from elasticjob_rendezvous.protocol.text import counted

Json = dict[str, Any]
Items = list[Json] | Unread

OLDEST_SERVER = (1, 29)
POLICIES_SERVER = (1, 30)
"""First release of the API server with admission policies."""
INSTALL = "install the chart: `helm upgrade --install elasticjob charts/elasticjob`"
EXPIRY_WARN = timedelta(days=7)
"""The chart renews certificates earlier: less is left only if its CronJob fails."""
PULL_ERRORS = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")
VERBS = ("get", "list", "create", "patch", "delete")
ENFORCING = ("calico", "cilium", "antrea", "weave", "kube-router", "kindnet", "ovn", "canal")
"""Names of network add-ons that enforce NetworkPolicies."""
NOT_ENFORCING = ("flannel",)
MOST_PATHS = 3
"""Maximum number of differing schema fields in a message."""


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Objects of a cluster as the API server returned them.

    Args:
        schema_paths: fields of this release's schema of ElasticJobs.
        etcd_health: answer of each etcd pod's health endpoint.
        certificates: end of each certificate by its key in etcd's Secret.
        access: permission for each verb on ElasticJobs in the namespace.
        claims: PersistentVolumeClaims of the operator's and the jobs' namespace.
    """

    now: datetime
    namespace: str
    cli_version: str
    schema_version: str
    schema_paths: frozenset[str]
    server: Json | Unread
    definition: Json | Unread
    deployments: Items
    lease: Json | Unread
    etcd_sets: Items
    etcd_health: Mapping[str, str | Unread]
    certificates: Mapping[str, datetime] | Unread
    authority: Json | Unread
    services: Items
    slices: Items
    dns: Items
    storage_classes: Items
    claims: Items
    jobs: Items
    policies: Items
    pods: Items
    job_pods: Items
    access: Mapping[str, bool] | Unread
    network_policies: Items
    daemon_sets: Items
    extra: Mapping[str, str] = field(default_factory=dict)


def cluster_findings(facts: ClusterFacts) -> list[Finding]:
    """Return the findings of all checks; without an API server that answers, only the first."""
    first = server_finding(facts)
    if isinstance(facts.server, Unread):
        return [first]
    return [
        first,
        definition_finding(facts),
        operator_finding(facts),
        version_finding(facts),
        leader_finding(facts),
        *etcd_findings(facts),
        certificates_finding(facts),
        authority_finding(facts),
        services_finding(facts),
        dns_finding(facts),
        *storage_findings(facts),
        policies_finding(facts),
        images_finding(facts),
        access_finding(facts),
        network_finding(facts),
    ]


def _minor(version: Json) -> tuple[int, int]:
    """Return the release of an API server, whose minor may have a suffix such as `31+`."""
    found = re.match(r"v?(\d+)\.(\d+)", str(version.get("gitVersion", "")))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def server_finding(facts: ClusterFacts) -> Finding:
    check = "API server"
    if isinstance(facts.server, Unread):
        remedy = "check the context (`kubectl config current-context`) and the network to it"
        return fail(check, facts.server.message, remedy)
    version, text = _minor(facts.server), str(facts.server.get("gitVersion", "unknown"))
    if version < OLDEST_SERVER:
        return fail(check, text, f"upgrade Kubernetes to {_text(OLDEST_SERVER)} or newer")
    if version < POLICIES_SERVER:
        remedy = f"upgrade to {_text(POLICIES_SERVER)}: older servers have no admission policies"
        return warn(check, text, remedy)
    return ok(check, text)


def _text(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def schema_paths(schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield each field of a structural schema with its type, such as `spec.nodes: integer`."""
    for name, child in (schema.get("properties") or {}).items():
        path = f"{prefix}{name}"
        yield f"{path}: {child.get('type', 'any')}"
        yield from schema_paths(child, f"{path}.")
    for part in ("items", "additionalProperties"):
        child = schema.get(part)
        if isinstance(child, Mapping):
            yield from schema_paths(child, f"{prefix}[].")


def definition_finding(facts: ClusterFacts) -> Finding:
    check, found = "CRD", facts.definition
    if isinstance(found, Unread):
        if found.absent:
            return fail(check, "elasticjobs.elasticjob.dev is not installed", INSTALL)
        return unread(check, found)
    versions = {
        version["name"]: version for version in found["spec"]["versions"] if version.get("served")
    }
    ours = versions.get(facts.schema_version)
    upgrade = "apply crds/elasticjobs.elasticjob.dev.yaml of this release"
    if ours is None:
        served = ", ".join(versions) or "none"
        return fail(check, f"{facts.schema_version} is not served, only: {served}", upgrade)
    conditions = {
        condition["type"]: condition
        for condition in found.get("status", {}).get("conditions") or ()
    }
    established = conditions.get("Established", {})
    if established.get("status") != "True":
        return fail(check, "it is not established", established.get("message") or upgrade)
    theirs = frozenset(schema_paths(ours.get("schema", {}).get("openAPIV3Schema", {})))
    if missing := sorted(facts.schema_paths - theirs):
        return fail(check, f"its schema lacks {_some(missing)}", upgrade)
    if more := sorted(theirs - facts.schema_paths):
        newer = "upgrade this command line to the release of the cluster"
        return warn(check, f"its schema also has {_some(more)}", newer)
    return ok(check, f"{facts.schema_version}, the schema is this release's")


def _some(paths: Sequence[str]) -> str:
    """Format differing fields; the fields below one of them are left out."""
    names = {path.partition(":")[0] for path in paths}
    paths = [path for path in paths if not any(path.startswith(f"{name}.") for name in names)]
    rest = len(paths) - MOST_PATHS
    return ", ".join(paths[:MOST_PATHS]) + (f" and {rest} more" if rest > 0 else "")


def _operator(facts: ClusterFacts) -> Json | None:
    """Return the operator's Deployment if there is exactly one."""
    found = facts.deployments
    return found[0] if isinstance(found, list) and len(found) == 1 else None


def operator_finding(facts: ClusterFacts) -> Finding:
    check, found = "operator", facts.deployments
    if isinstance(found, Unread):
        return unread(check, found)
    if not found:
        return fail(check, "no Deployment of the operator", INSTALL)
    if len(found) > 1:
        names = ", ".join(_place(one) for one in found)
        remedy = "uninstall all but one, unless each serves namespaces of its own"
        return warn(check, f"several: {names}", remedy)
    wanted = found[0]["spec"].get("replicas", 1)
    ready = found[0].get("status", {}).get("readyReplicas", 0)
    text = f"{_place(found[0])}: {ready} of {wanted} replicas ready"
    logs = f"kubectl -n {found[0]['metadata']['namespace']} logs deployment/{_name(found[0])}"
    if ready == 0:
        return fail(check, text, f"the log has the reason: `{logs}`")
    return ok(check, text) if ready >= wanted else warn(check, text, f"see `{logs}`")


def _name(found: Json) -> str:
    return str(found["metadata"]["name"])


def _place(found: Json) -> str:
    return f"{found['metadata']['namespace']}/{_name(found)}"


def version_finding(facts: ClusterFacts) -> Finding:
    check, operator = "versions", _operator(facts)
    if operator is None:
        return ok(check, f"command line {facts.cli_version}")
    theirs = operator["metadata"].get("labels", {}).get("app.kubernetes.io/version", "unknown")
    text = f"command line {facts.cli_version}, operator {theirs}"
    if theirs != facts.cli_version:
        return warn(check, text, "install the same release of both")
    return ok(check, text)


def leader_finding(facts: ClusterFacts) -> Finding:
    check, lease = "leader", facts.lease
    if isinstance(lease, Unread):
        if lease.absent:
            return fail(check, "no replica of the operator has become active", "see its log")
        return unread(check, lease)
    spec = lease.get("spec", {})
    holder, renewed = spec.get("holderIdentity"), spec.get("renewTime")
    if not holder or not renewed:
        return fail(check, "no replica of the operator is active", "see its log")
    silent = (facts.now - datetime.fromisoformat(renewed)).total_seconds()
    if silent > 3 * spec.get("leaseDurationSeconds", 8):
        remedy = "see the operator's log; a wrong clock of this machine also looks so"
        return fail(check, f"{holder} last renewed its lease {silent:.0f} s ago", remedy)
    return ok(check, str(holder))


def etcd_findings(facts: ClusterFacts) -> list[Finding]:
    """Return the findings on the bundled etcd: members, and the health that each reports."""
    check, found = "etcd", facts.etcd_sets
    if isinstance(found, Unread):
        return [unread(check, found)]
    if not found:
        endpoints = facts.extra.get("endpoints", "")
        if not endpoints:
            return [warn(check, "no etcd of the chart", INSTALL)]
        return [ok(check, f"external, not reached from here: {endpoints}")]
    findings = []
    for one in found:
        wanted = one["spec"].get("replicas", 1)
        ready = one.get("status", {}).get("readyReplicas", 0)
        text = f"{_place(one)}: {ready} of {counted(wanted, 'member')} ready"
        see = f"see `kubectl -n {one['metadata']['namespace']} describe pods -l "
        remedy = f"{see}app.kubernetes.io/component=etcd`"
        if 2 * ready <= wanted:
            findings.append(fail(check, f"{text}, less than a majority", remedy))
        else:
            findings.append(ok(check, text) if ready == wanted else warn(check, text, remedy))
    for pod, health in sorted(facts.etcd_health.items()):
        if isinstance(health, Unread):
            findings.append(unread(f"etcd {pod}", health))
        elif '"health":"true"' in health.replace(" ", ""):
            findings.append(ok(f"etcd {pod}", "healthy"))
        else:
            findings.append(fail(f"etcd {pod}", health.strip(), "see the log of the pod"))
    return findings


def certificates_finding(facts: ClusterFacts) -> Finding:
    check, ends = "certificates", facts.certificates
    if isinstance(ends, Unread):
        return unread(check, ends)
    if not ends:
        return ok(check, "none: etcd is external, or without TLS")
    name, first = min(ends.items(), key=lambda item: item[1])
    text = f"{name} is the first to expire, on {first:%Y-%m-%d %H:%M} UTC"
    remedy = "run the chart's CronJob of certificates: `kubectl create job --from=cronjob/...`"
    if first <= facts.now:
        return fail(check, f"{name} expired on {first:%Y-%m-%d %H:%M} UTC", remedy)
    return warn(check, text, remedy) if first - facts.now < EXPIRY_WARN else ok(check, text)


def authority_finding(facts: ClusterFacts) -> Finding:
    check, found = "authority", facts.authority
    if not isinstance(found, Unread):
        return ok(check, f"Secret {_place(found)}" if found else "none needed")
    if found.absent:
        remedy = "without it certificates cannot be renewed: run the chart's CronJob, see its log"
        return fail(check, "the Secret with the keys of etcd's authority is missing", remedy)
    return unread(check, found)


def services_finding(facts: ClusterFacts) -> Finding:
    """Return the finding on Services of the chart, each of which needs an endpoint."""
    check, services, slices = "services", facts.services, facts.slices
    if isinstance(services, Unread):
        return unread(check, services)
    if isinstance(slices, Unread):
        return unread(check, slices)
    served = {
        slice_["metadata"].get("labels", {}).get("kubernetes.io/service-name")
        for slice_ in slices
        if slice_.get("endpoints")
    }
    empty = sorted(_name(service) for service in services if _name(service) not in served)
    if empty:
        remedy = "their pods do not run: see the checks of the operator and of etcd"
        return fail(check, f"no endpoints: {', '.join(empty)}", remedy)
    return ok(check, f"{len(services)} with endpoints")


def dns_finding(facts: ClusterFacts) -> Finding:
    check, found = "DNS", facts.dns
    if isinstance(found, Unread):
        return unread(check, found)
    ready = sum(
        endpoint.get("conditions", {}).get("ready") is not False
        for one in found
        for endpoint in one.get("endpoints") or ()
    )
    if not ready:
        remedy = "pods find etcd and each other by name: start CoreDNS (label k8s-app=kube-dns)"
        return warn(check, "no ready endpoint of kube-dns in kube-system", remedy)
    return ok(check, f"{ready} ready endpoint{'s' * (ready > 1)} of kube-dns")


def storage_findings(facts: ClusterFacts) -> list[Finding]:
    """Return the findings on storage classes, pending claims, and claims that jobs name."""
    classes, claims, jobs = facts.storage_classes, facts.claims, facts.jobs
    findings = []
    if isinstance(classes, Unread):
        findings.append(unread("storage classes", classes))
    else:
        default = "storageclass.kubernetes.io/is-default-class"
        marked = [
            _name(storage_class)
            for storage_class in classes
            if storage_class["metadata"].get("annotations", {}).get(default) == "true"
        ]
        if marked:
            findings.append(ok("storage classes", f"default: {', '.join(marked)}"))
        else:
            names = ", ".join(map(_name, classes)) or "none"
            remedy = "set storageClassName in claims and in etcd.persistence, or mark a default"
            findings.append(warn("storage classes", f"no default; there is: {names}", remedy))
    if isinstance(claims, Unread):
        return [*findings, unread("claims", claims)]
    pending = [_place(claim) for claim in claims if claim.get("status", {}).get("phase") != "Bound"]
    if pending:
        remedy = "see `kubectl describe pvc`; with WaitForFirstConsumer the pod must start first"
        findings.append(warn("claims", f"not bound: {', '.join(pending)}", remedy))
    if isinstance(jobs, Unread):
        return [*findings, unread("claims of jobs", jobs)]
    there = {_name(claim) for claim in claims if claim["metadata"]["namespace"] == facts.namespace}
    missing = sorted(
        f"{claim} (of {_name(job)})" for job in jobs for claim in _claims(job) if claim not in there
    )
    if missing:
        remedy = "create the claims: pods that mount them stay Pending"
        return [*findings, fail("claims of jobs", f"missing: {', '.join(missing)}", remedy)]
    if not pending:
        findings.append(ok("claims", f"{len(claims)} bound"))
    return findings


def _claims(job: Json) -> set[str]:
    """Return the names of the claims in a job's template."""
    spec = job.get("spec", {}).get("template", {}).get("spec", {})
    return {
        volume["persistentVolumeClaim"].get("claimName", "")
        for volume in spec.get("volumes") or ()
        if volume.get("persistentVolumeClaim")
    }


def policies_finding(facts: ClusterFacts) -> Finding:
    check, found = "admission policies", facts.policies
    if isinstance(found, Unread):
        return unread(check, found)
    kinds = {
        kind: [_name(one) for one in found if one.get("kind") == kind]
        for kind in ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
    }
    policies, bindings = kinds.values()
    if not policies:
        remedy = (
            "enable admissionPolicy in the chart: without it, users who may create ElasticJobs "
            "can run pods with any service account of their namespace"
        )
        return warn(check, "none of the chart", remedy)
    if unbound := sorted(set(policies) - set(bindings)):
        return warn(check, f"without binding: {', '.join(unbound)}", "upgrade the release")
    return ok(check, f"{len(policies)}, all bound")


def images_finding(facts: ClusterFacts) -> Finding:
    """Return the finding on images of the operator, etcd and jobs that cannot be pulled."""
    check = "images"
    if isinstance(facts.pods, Unread):
        return unread(check, facts.pods)
    if isinstance(facts.job_pods, Unread):
        return unread(check, facts.job_pods)
    pods = [*facts.pods, *facts.job_pods]
    troubles = [trouble for pod in pods for trouble in _pull_errors(pod)]
    if troubles:
        remedy = "correct the image's name, push it, or name a pull secret (sidecar.pullSecrets)"
        return fail(check, "; ".join(sorted(troubles)[:MOST_PATHS]), remedy)
    return ok(check, f"no pull error in {counted(len(pods), 'pod')}")


def _pull_errors(pod: Json) -> Iterator[str]:
    status = pod.get("status", {})
    for kind in ("initContainerStatuses", "containerStatuses"):
        for one in status.get(kind) or ():
            waiting = one.get("state", {}).get("waiting") or {}
            if waiting.get("reason") in PULL_ERRORS:
                yield f"{_place(pod)}: {waiting['reason']}: {one.get('image', '')}"


def access_finding(facts: ClusterFacts) -> Finding:
    check, access = "your permissions", facts.access
    if isinstance(access, Unread):
        return unread(check, access)
    missing = [verb for verb in VERBS if not access.get(verb)]
    where = f"on ElasticJobs in {facts.namespace}"
    remedy = f"bind the cluster's role `edit` to you in {facts.namespace}"
    if "get" in missing or "list" in missing:
        return fail(check, f"no {', '.join(missing)} {where}", remedy)
    if missing:
        return warn(check, f"no {', '.join(missing)} {where}", remedy)
    return ok(check, f"{', '.join(VERBS)} {where}")


def network_finding(facts: ClusterFacts) -> Finding:
    """Return the finding on NetworkPolicies. No API reports if they are enforced."""
    check, found = "network policies", facts.network_policies
    if isinstance(found, Unread):
        return unread(check, found)
    if not found:
        remedy = "enable networkPolicy in the chart: nothing else keeps pods from etcd's port"
        return warn(check, "none of the chart", remedy)
    text = f"{len(found)} of the chart"
    sets = facts.daemon_sets
    names = [] if isinstance(sets, Unread) else [_name(daemon_set) for daemon_set in sets]
    enforcing = [name for name in names if any(known in name for known in ENFORCING)]
    if enforcing:
        return ok(check, f"{text}, enforced by {', '.join(enforcing)}")
    remedy = "test it: a pod outside the job must not reach etcd; Calico and Cilium enforce them"
    if plain := [name for name in names if any(known in name for known in NOT_ENFORCING)]:
        return warn(check, f"{text}, which {', '.join(plain)} alone does not enforce", remedy)
    return warn(check, f"{text}; no known network add-on that enforces them", remedy)
