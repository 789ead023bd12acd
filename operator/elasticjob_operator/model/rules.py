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
MODULES: Location = ("recovery", "warmStartModules")
NODE_INCREMENT: Location = ("nodeIncrement",)
SECRET_NAME: Location = ("rendezvous", "secretName")
JOIN_TIMEOUT: Location = ("rendezvous", "joinTimeoutSeconds")
LAST_CALL: Location = ("rendezvous", "lastCallSeconds")
SNAPSHOTS: Location = ("recovery", "snapshots")
STORAGE: Location = (*SNAPSHOTS, "storage")
QUEUE: Location = ("runPolicy", "schedulingPolicy", "queue")
SETUP: Location = ("setup",)
ENTRYPOINT: Location = ("entrypoint",)
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


def _value(spec: Document, location: Location) -> Any:
    """Return the value at a location, or its default, or None."""
    found: Any = spec
    for step in location:
        found = found.get(step) if isinstance(found, Mapping) else None
    return _DEFAULTS.get(location) if found is None else found


_DEFAULTS: dict[Location, Any] = {
    NODE_INCREMENT: ElasticJobSpec.model_fields["node_increment"].default,
    BACKEND: Rendezvous.model_fields["backend"].default,
    JOIN_TIMEOUT: Rendezvous.model_fields["join_timeout_seconds"].default,
    LAST_CALL: Rendezvous.model_fields["last_call_seconds"].default,
    ENDPOINTS: [],
    MODULES: [],
    SETUP: [],
    ENTRYPOINT: [],
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


def _one_interval(spec: Document) -> Iterable[Location]:
    at = (*SNAPSHOTS, "everySteps")
    if None not in (_value(spec, at), _value(spec, (*SNAPSHOTS, "intervalSeconds"))):
        yield at


def _one_storage(spec: Document) -> Iterable[Location]:
    if _value(spec, STORAGE) is not None:
        claim, path = (_value(spec, (*STORAGE, name)) for name in ("claim", "path"))
        if (claim is None) == (path is None):
            yield STORAGE


def _trainers(spec: Document) -> list[tuple[int, Any]]:
    """Return index and document of the trainer container; several if their names are equal."""
    name, containers = _value(spec, ("trainer",)), _value(spec, CONTAINERS)
    return [
        (index, container)
        for index, container in enumerate(containers)
        if (len(containers) == 1 if name is None else container["name"] == name)
    ]


def _trainer_has_a_command(spec: Document) -> Iterable[Location]:
    for index, container in _trainers(spec):
        if not container.get("command") and not _value(spec, ENTRYPOINT):
            yield (*CONTAINERS, index, "command")


def _one_entry_point(spec: Document) -> Iterable[Location]:
    both = any(container.get("command") for _, container in _trainers(spec))
    if both and _value(spec, ENTRYPOINT):
        yield ENTRYPOINT


def _begins_with_a_program(location: Location) -> Callable[[Document], Iterable[Location]]:
    def check(spec: Document) -> Iterable[Location]:
        if _value(spec, location)[:1] == [""]:
            yield location

    return check


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


def _unique(field: Location) -> Callable[[Document], Iterable[Location]]:
    """Return a check that a list does not repeat an entry; yields the repeated entries."""

    def check(spec: Document) -> Iterable[Location]:
        entries: Sequence[str] = _value(spec, field)
        for index, entry in enumerate(entries):
            if entry in entries[:index]:
                yield (*field, index)

    return check


def _secret_belongs_to_endpoints(spec: Document) -> Iterable[Location]:
    backend = _value(spec, BACKEND)
    usable = backend != Backend.C10D and _value(spec, ENDPOINTS)
    if _value(spec, SECRET_NAME) is not None and not usable:
        yield SECRET_NAME


def _absent(field: Location) -> Callable[[Document], Iterable[Location]]:
    """Return a check that a field is absent."""

    def check(spec: Document) -> Iterable[Location]:
        if _value(spec, field) is not None:
            yield field

    return check


def _unsupported(field: Location, message: str) -> Rule:
    """Return the rule for a field of runPolicy.schedulingPolicy on which nothing acts."""
    policy = "self.runPolicy.schedulingPolicy"
    cel = f"!has({policy}) || !has({policy}.{field[-1]})"
    return Rule(field, message, cel, _absent(field))


_PODS = "self.template.spec.containers"
_OTHER = f"(has(self.trainer) ? c.name != self.trainer : {_PODS}.size() > 1)"
"""CEL: c is not the trainer container."""
_COMMANDED = "(has(c.command) && c.command.size() > 0)"
_INIT = "self.template.spec.initContainers"
_RESERVED = "[" + ", ".join(f"'{name}'" for name in RESERVED_NAMES) + "]"

RULES: tuple[Rule, ...] = (
    Rule(
        ("maxNodes",),
        "must be at least minNodes",
        "!has(self.minNodes) || self.maxNodes >= self.minNodes",
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
        "command must be set in the trainer container, for example to [python3, train.py]: the "
        "image's own entry point is not known here; or give it in spec.entrypoint, to which args "
        "are added",
        f"self.entrypoint.size() > 0 || {_PODS}.all(c, {_OTHER} || {_COMMANDED})",
        _trainer_has_a_command,
    ),
    Rule(
        ENTRYPOINT,
        "must be absent if the trainer container has a command, which replaces it",
        f"self.entrypoint.size() == 0 || {_PODS}.all(c, {_OTHER} || !{_COMMANDED})",
        _one_entry_point,
    ),
    *(
        Rule(
            (name,),
            "must begin with a program",
            f"self.{name}.size() == 0 || self.{name}[0] != ''",
            _begins_with_a_program((name,)),
        )
        for name in ("setup", "entrypoint")
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
        "must hold at most one endpoint for backend C10d: its store is on one host",
        "self.rendezvous.backend != 'C10d' || self.rendezvous.endpoints.size() <= 1",
        _one_c10d_endpoint,
    ),
    Rule(
        NODE_INCREMENT,
        "must be 1 unless rendezvous.backend is Etcd: the others only know a minimum and a maximum",
        "self.rendezvous.backend == 'Etcd' || self.nodeIncrement == 1",
        _sizes_are_known,
    ),
    Rule(
        ENDPOINTS,
        "must not repeat an endpoint",
        "self.rendezvous.endpoints.all(e, self.rendezvous.endpoints.exists_one(f, f == e))",
        _unique(ENDPOINTS),
    ),
    Rule(
        MODULES,
        "must not repeat a module",
        "self.recovery.warmStartModules.all(m, "
        "self.recovery.warmStartModules.exists_one(n, n == m))",
        _unique(MODULES),
    ),
    Rule(
        (*SNAPSHOTS, "everySteps"),
        "must be absent if intervalSeconds is given: both are the interval of the snapshots",
        "!has(self.recovery.snapshots) || !has(self.recovery.snapshots.everySteps) || "
        "!has(self.recovery.snapshots.intervalSeconds)",
        _one_interval,
    ),
    Rule(
        STORAGE,
        "must have either claim or path",
        "!has(self.recovery.snapshots) || !has(self.recovery.snapshots.storage) || "
        "has(self.recovery.snapshots.storage.claim) != has(self.recovery.snapshots.storage.path)",
        _one_storage,
    ),
    Rule(
        SECRET_NAME,
        "must be absent unless endpoints of etcd are given: the operator makes one for its own",
        "!has(self.rendezvous.secretName) || "
        "(self.rendezvous.backend != 'C10d' && self.rendezvous.endpoints.size() > 0)",
        _secret_belongs_to_endpoints,
    ),
    Rule(
        JOIN_TIMEOUT,
        "must be at least lastCallSeconds, or the job ends before it starts below its wanted size",
        "self.rendezvous.joinTimeoutSeconds >= self.rendezvous.lastCallSeconds",
        _ordered(LAST_CALL, JOIN_TIMEOUT, JOIN_TIMEOUT),
    ),
    _unsupported(
        QUEUE,
        "must be absent: nothing acts on it; name the queue with the scheduler's own label or "
        "annotation in template.metadata",
    ),
    _unsupported(
        MIN_AVAILABLE,
        "must be absent: nothing acts on it; set it in the scheduler's own PodGroup, which "
        "template.metadata names",
    ),
)
