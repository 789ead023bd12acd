"""Rules of a pod's metadata and of the fields of its spec that concern the pod as a whole."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from elasticjob_operator.domain.manifests.pod_rules.amounts import amount_faults
from elasticjob_operator.domain.manifests.pod_rules.fields import (
    DNS_LABEL,
    DNS_SEARCH,
    DNS_SUBDOMAIN,
    LABEL_VALUE,
    MOST_ID,
    QUALIFIED_NAME,
    SYSCTL,
    Fault,
    Field,
    in_range,
    must_be_set,
    relative_path_faults,
    unique,
)

_OBJECT_NAMES = (
    "serviceAccountName",
    "serviceAccount",
    "nodeName",
    "priorityClassName",
    "runtimeClassName",
    "hostnameOverride",
)
_MOST_ANNOTATIONS = 256 * 1024
"""Maximum length of all annotations in bytes."""
_MOST_NAMESERVERS, _MOST_SEARCHES, _MOST_SEARCH_CHARACTERS = 3, 32, 2048


def pod_faults(pod: Field) -> Iterator[Fault]:
    yield from metadata_faults(pod.child("metadata"))
    spec = pod.child("spec")
    yield from in_range(spec.child("activeDeadlineSeconds"), 1, MOST_ID)
    for name in _OBJECT_NAMES:
        if spec.child(name).value:
            yield from DNS_SUBDOMAIN.faults(spec.child(name))
    if spec.child("priority").value and not spec.child("priorityClassName").value:
        yield spec.child("priority").fault("must be absent: priorityClassName sets the priority")
    yield from preemption_faults(spec)
    system = spec.child("os", "name")
    if system.value not in (None, "linux"):
        yield system.fault("must be linux: so are the launcher and the agent")
    for label, value in spec.entries("nodeSelector"):
        yield from QUALIFIED_NAME.faults(value, label)
        yield from LABEL_VALUE.faults(value)
    for gate in spec.items("readinessGates"):
        yield from QUALIFIED_NAME.faults(gate.child("conditionType"))
    for gate in spec.items("schedulingGates"):
        yield from QUALIFIED_NAME.faults(gate.child("name"))
    for alias in spec.items("hostAliases"):
        yield from _address_faults(alias.child("ip"))
        for hostname in alias.items("hostnames"):
            yield from DNS_SUBDOMAIN.faults(hostname)
    yield from _dns_faults(spec)
    yield from _security_faults(spec)
    yield from _namespace_faults(spec)
    yield from _claim_faults(spec.items("resourceClaims"))
    yield from amount_faults(spec.child("resources"), [], whole_pod=True)
    if spec.child("overhead").value and not spec.child("runtimeClassName").value:
        yield spec.child("overhead").fault(
            "must be absent without runtimeClassName: only the class of a runtime has an overhead"
        )


def preemption_faults(spec: Field) -> Iterator[Fault]:
    """Yield the fault of a preemption policy without a class that has it.

    The API server accepts it only if the cluster's default class has the same policy.
    """
    policy = spec.child("preemptionPolicy")
    if policy.value == "Never" and not spec.child("priorityClassName").value:
        yield policy.fault(
            "must be absent without priorityClassName: a priority class sets it; name one with "
            "preemptionPolicy Never"
        )


def metadata_faults(metadata: Field) -> Iterator[Fault]:
    """Yield the faults of an object's labels and annotations."""
    for label, value in metadata.entries("labels"):
        yield from QUALIFIED_NAME.faults(value, label)
        yield from LABEL_VALUE.faults(value)
    size = 0
    for name, value in metadata.entries("annotations"):
        yield from QUALIFIED_NAME.faults(value, name.lower())
        size += len(name.encode()) + len(value.text.encode())
    if size > _MOST_ANNOTATIONS:
        yield metadata.child("annotations").fault(
            f"must be at most {_MOST_ANNOTATIONS} bytes long in total; they are {size}"
        )


def _address_faults(field: Field) -> Iterator[Fault]:
    try:
        ipaddress.ip_address(field.text)
    except ValueError:
        yield field.fault(f"must be an IP address; got {field.text!r}")


def _dns_faults(spec: Field) -> Iterator[Fault]:
    config = spec.child("dnsConfig")
    servers, searches = config.child("nameservers"), config.child("searches")
    if spec.child("dnsPolicy").value == "None" and not servers.value:
        missing = servers if config.present else config
        yield missing.fault("must be set with dnsPolicy None: the pod would have no name server")
        return
    if len(servers.value or ()) > _MOST_NAMESERVERS:
        yield servers.fault(f"must hold at most {_MOST_NAMESERVERS} entries")
    for server in config.items("nameservers"):
        yield from _address_faults(server)
    if len(searches.value or ()) > _MOST_SEARCHES:
        yield searches.fault(f"must hold at most {_MOST_SEARCHES} entries")
    if len(" ".join(searches.value or ())) > _MOST_SEARCH_CHARACTERS:
        yield searches.fault(f"must be at most {_MOST_SEARCH_CHARACTERS} characters long in total")
    for search in config.items("searches"):
        yield from DNS_SEARCH.faults(search)
    for option in config.items("options"):
        if not option.child("name").value:
            yield option.fault("name must be set")


def _security_faults(spec: Field) -> Iterator[Fault]:
    context = spec.child("securityContext")
    for name in ("fsGroup", "runAsUser", "runAsGroup"):
        yield from in_range(context.child(name), 0, MOST_ID)
    for group in context.items("supplementalGroups"):
        yield from in_range(group, 0, MOST_ID)
    names = [sysctl.child("name") for sysctl in context.items("sysctls")]
    for name_field in names:
        yield from SYSCTL.faults(name_field)
    yield from unique(names)
    yield from profile_faults(context)


def profile_faults(context: Field) -> Iterator[Fault]:
    """Yield the faults of the profiles of seccomp and AppArmor in a security context."""
    for kind in ("seccompProfile", "appArmorProfile"):
        profile = context.child(kind)
        path = profile.child("localhostProfile")
        local = profile.child("type").value == "Localhost"
        if local and not path.present:
            yield path.fault("must be set with type Localhost")
        elif path.present and not local:
            yield path.fault("must be absent unless type is Localhost")
        elif path.present and kind == "seccompProfile":
            yield from relative_path_faults(path)
        elif path.present and (not path.text or path.text != path.text.strip()):
            yield path.fault("must not be empty or have spaces around it")


def _namespace_faults(spec: Field) -> Iterator[Fault]:
    """Yield contradictions between the host's namespaces and those of the pod."""
    host_pid = spec.child("hostPID")
    if host_pid.value and spec.child("shareProcessNamespace").value:
        yield spec.child("shareProcessNamespace").fault("must not be true with hostPID")
    if spec.child("hostUsers").value is False:
        for name in ("hostNetwork", "hostPID", "hostIPC"):
            if spec.child(name).value:
                yield spec.child(name).fault("must not be true with hostUsers: false")


def _claim_faults(claims: list[Field]) -> Iterator[Fault]:
    for claim in claims:
        yield from DNS_LABEL.faults(claim.child("name"))
        sources = [claim.child(f"resourceClaim{kind}") for kind in ("Name", "TemplateName")]
        given = [source for source in sources if source.present]
        if len(given) != 1:
            yield claim.fault("must have either resourceClaimName or resourceClaimTemplateName")
        for source in given:
            yield from must_be_set(source)
            if source.value:
                yield from DNS_SUBDOMAIN.faults(source)
