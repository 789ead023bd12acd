"""Rules between fields, each in Python and in CEL for the API server.

`check` gets a `spec` whose fields have the right types, though some may be absent, and returns the
locations (below `spec`) that break the rule. CEL sees the spec with its defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticjob_operator.model.job import ElasticJobSpec, Rendezvous
from elasticjob_operator.model.problems import Location
from elasticjob_operator.model.types import Backend

Document = Mapping[str, Any]
CONTAINERS: Location = ("template", "spec", "containers")
INIT_CONTAINERS: Location = ("template", "spec", "initContainers")
BACKEND: Location = ("rendezvous", "backend")
ENDPOINTS: Location = ("rendezvous", "endpoints")
NODE_INCREMENT: Location = ("nodeIncrement",)
SECRET_NAME: Location = ("rendezvous", "secretName")
JOIN_TIMEOUT: Location = ("rendezvous", "joinTimeoutSeconds")
LAST_CALL: Location = ("rendezvous", "lastCallSeconds")
MIN_AVAILABLE: Location = ("runPolicy", "schedulingPolicy", "minAvailable")
RESERVED_NAMES = ("elasticjob-agent", "elasticjob-launcher")
"""Names of the containers that the operator adds to each pod."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Rule between fields. `field` is the subject of the message, below `spec`; CEL's self is the
    spec."""

    field: Location
    message: str
    cel: str
    check: Callable[[Document], Iterable[Location]]


@dataclass(frozen=True, slots=True)
class Immutable:
    """Field that may change only while the job is suspended; enforced by the API server alone."""

    field: Location
    message: str
    cel: str


def _value(spec: Document, location: Location) -> Any:
    """Return the value at a location, or its default, or None."""
    found: Any = spec
    for step in location:
        found = found.get(step) if isinstance(found, Mapping) else None
    return _DEFAULTS.get(location) if found is None else found


_DEFAULTS: dict[Location, Any] = {
    ("minNodes",): ElasticJobSpec.model_fields["min_nodes"].default,
    NODE_INCREMENT: ElasticJobSpec.model_fields["node_increment"].default,
    BACKEND: Rendezvous.model_fields["backend"].default,
    JOIN_TIMEOUT: Rendezvous.model_fields["join_timeout_seconds"].default,
    LAST_CALL: Rendezvous.model_fields["last_call_seconds"].default,
    ENDPOINTS: [],
    CONTAINERS: [],
    INIT_CONTAINERS: [],
}


def _ordered(
    smaller: Location, larger: Location, blamed: Location
) -> Callable[[Document], Iterable[Location]]:
    """Return a check that the value at `smaller` does not exceed that at `larger`; it passes if
    one is absent."""

    def check(spec: Document) -> Iterable[Location]:
        least, most = _value(spec, smaller), _value(spec, larger)
        if most is not None and least is not None and most < least:
            yield blamed

    return check


def _named(spec: Document) -> list[tuple[Location, str]]:
    """Return location and name of all containers, regular ones before init containers."""
    return [
        ((*location, index), container["name"])
        for location in (CONTAINERS, INIT_CONTAINERS)
        for index, container in enumerate(_value(spec, location))
    ]


def _trainer_is_named(spec: Document) -> Iterable[Location]:
    if _value(spec, ("trainer",)) is None and len(_value(spec, CONTAINERS)) > 1:
        yield ("trainer",)


def _trainer_exists(spec: Document) -> Iterable[Location]:
    name = _value(spec, ("trainer",))
    if name is not None and all(found["name"] != name for found in _value(spec, CONTAINERS)):
        yield ("trainer",)


def _trainer_has_a_command(spec: Document) -> Iterable[Location]:
    name, containers = _value(spec, ("trainer",)), _value(spec, CONTAINERS)
    for index, container in enumerate(containers):
        trains = len(containers) == 1 if name is None else container["name"] == name
        if trains and not container.get("command"):
            yield (*CONTAINERS, index, "command")


def _names_are_unique(spec: Document) -> Iterable[Location]:
    seen: set[str] = set()
    for location, name in _named(spec):
        if name in seen:
            yield (*location, "name")
        seen.add(name)


def _names_are_free(spec: Document) -> Iterable[Location]:
    for location, name in _named(spec):
        if name in RESERVED_NAMES:
            yield (*location, "name")


def _one_c10d_endpoint(spec: Document) -> Iterable[Location]:
    if _value(spec, BACKEND) == Backend.C10D and len(_value(spec, ENDPOINTS)) > 1:
        yield ENDPOINTS


def _sizes_are_known(spec: Document) -> Iterable[Location]:
    if _value(spec, BACKEND) != Backend.ETCD and _value(spec, NODE_INCREMENT) != 1:
        yield NODE_INCREMENT


def _endpoints_are_unique(spec: Document) -> Iterable[Location]:
    endpoints: Sequence[str] = _value(spec, ENDPOINTS)
    for index, endpoint in enumerate(endpoints):
        if endpoint in endpoints[:index]:
            yield (*ENDPOINTS, index)


def _secret_belongs_to_endpoints(spec: Document) -> Iterable[Location]:
    backend = _value(spec, BACKEND)
    usable = backend != Backend.C10D and _value(spec, ENDPOINTS)
    if _value(spec, SECRET_NAME) is not None and not usable:
        yield SECRET_NAME


_PODS = "self.template.spec.containers"
_INIT = "self.template.spec.initContainers"
_RESERVED = "[" + ", ".join(f"'{name}'" for name in RESERVED_NAMES) + "]"
_UNSUSPENDED = "self.runPolicy.suspend || oldSelf.runPolicy.suspend"

RULES: tuple[Rule, ...] = (
    Rule(
        ("maxNodes",),
        "must be at least minNodes",
        "self.maxNodes >= self.minNodes",
        _ordered(("minNodes",), ("maxNodes",), ("maxNodes",)),
    ),
    Rule(
        ("trainer",),
        "must be set when the template has more than one container",
        "has(self.trainer) || self.template.spec.containers.size() == 1",
        _trainer_is_named,
    ),
    Rule(
        ("trainer",),
        "must be the name of one of the template's containers",
        "!has(self.trainer) || self.template.spec.containers.exists(c, c.name == self.trainer)",
        _trainer_exists,
    ),
    Rule(
        CONTAINERS,
        "command must be set in the trainer container: the image's own is not known here",
        "self.template.spec.containers.all(c, (has(self.trainer) ? c.name != self.trainer : "
        "self.template.spec.containers.size() > 1) || (has(c.command) && c.command.size() > 0))",
        _trainer_has_a_command,
    ),
    Rule(
        CONTAINERS,
        "names must be unique among the pod's containers and init containers",
        f"{_PODS}.all(c, {_PODS}.exists_one(d, d.name == c.name)) && "
        f"(!has({_INIT}) || {_INIT}.all(c, {_INIT}.exists_one(d, d.name == c.name) && "
        f"!{_PODS}.exists(d, d.name == c.name)))",
        _names_are_unique,
    ),
    Rule(
        CONTAINERS,
        f"names must not be {' or '.join(RESERVED_NAMES)}: these containers are added to the pod",
        f"{_PODS}.all(c, !(c.name in {_RESERVED})) && "
        f"(!has({_INIT}) || {_INIT}.all(c, !(c.name in {_RESERVED})))",
        _names_are_free,
    ),
    Rule(
        ENDPOINTS,
        "must hold at most one endpoint for backend c10d: its store is on one host",
        "self.rendezvous.backend != 'c10d' || self.rendezvous.endpoints.size() <= 1",
        _one_c10d_endpoint,
    ),
    Rule(
        NODE_INCREMENT,
        "must be 1 unless rendezvous.backend is etcd: the others only know a minimum and a maximum",
        "self.rendezvous.backend == 'etcd' || self.nodeIncrement == 1",
        _sizes_are_known,
    ),
    Rule(
        ENDPOINTS,
        "must not repeat an endpoint",
        "self.rendezvous.endpoints.all(e, self.rendezvous.endpoints.exists_one(f, f == e))",
        _endpoints_are_unique,
    ),
    Rule(
        SECRET_NAME,
        "must be absent unless endpoints of etcd are given: the operator makes one for its own",
        "!has(self.rendezvous.secretName) || "
        "(self.rendezvous.backend != 'c10d' && self.rendezvous.endpoints.size() > 0)",
        _secret_belongs_to_endpoints,
    ),
    Rule(
        JOIN_TIMEOUT,
        "must be at least lastCallSeconds, or the job ends before it starts below its wanted size",
        "self.rendezvous.joinTimeoutSeconds >= self.rendezvous.lastCallSeconds",
        _ordered(LAST_CALL, JOIN_TIMEOUT, JOIN_TIMEOUT),
    ),
    Rule(
        MIN_AVAILABLE,
        "must be at most maxNodes",
        "!has(self.runPolicy.schedulingPolicy) || "
        "!has(self.runPolicy.schedulingPolicy.minAvailable) || "
        "self.runPolicy.schedulingPolicy.minAvailable <= self.maxNodes",
        _ordered(MIN_AVAILABLE, ("maxNodes",), MIN_AVAILABLE),
    ),
)


def _immutable(name: str, unchanged: str) -> Immutable:
    # Suspension on either side counts: Kueue changes the template in the write that suspends or
    # resumes.
    return Immutable(
        (name,),
        "must change only while the job is suspended (runPolicy.suspend)",
        f"{unchanged} || {_UNSUSPENDED}",
    )


def _told_once(name: str) -> Immutable:
    """Return the rule for a field that agents of torch backends read only at their start: agents
    started later would disagree."""
    return Immutable(
        (name,),
        "must change only while the job is suspended, unless rendezvous.backend is etcd",
        f"self.{name} == oldSelf.{name} || self.rendezvous.backend == 'etcd' || {_UNSUSPENDED}",
    )


IMMUTABLE: tuple[Immutable, ...] = (
    _immutable("template", "self.template == oldSelf.template"),
    _immutable(
        "nprocPerNode",
        "(has(self.nprocPerNode) == has(oldSelf.nprocPerNode) && "
        "(!has(self.nprocPerNode) || self.nprocPerNode == oldSelf.nprocPerNode))",
    ),
    _immutable(
        "trainer",
        "(has(self.trainer) ? self.trainer : '') == (has(oldSelf.trainer) ? oldSelf.trainer : '')",
    ),
    _immutable("rendezvous", "self.rendezvous == oldSelf.rendezvous"),
    *(_told_once(name) for name in ("minNodes", "maxNodes", "maxRestarts")),
)
