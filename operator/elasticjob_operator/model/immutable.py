"""Fields that may change only while the job is suspended, in CEL: only the API server knows both
the old and the new object."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_operator.model.job import MAX_CONTAINERS, MAX_VARIABLES
from elasticjob_operator.model.problems import Location
from elasticjob_operator.model.rules import CONTAINERS, INIT_CONTAINERS

PRIORITY_CLASS: Location = ("runPolicy", "schedulingPolicy", "priorityClass")
_UNSUSPENDED = "self.runPolicy.suspend || oldSelf.runPolicy.suspend"


@dataclass(frozen=True, slots=True)
class Immutable:
    """Field that may change only while the job is suspended; enforced by the API server alone."""

    field: Location
    message: str
    cel: str


def _immutable(
    field: str | Location, unchanged: str, reason: str = "", unless: str = ""
) -> Immutable:
    """Return the rule that a field changes only during a suspension.

    `reason` follows the message, and `unless` is CEL for an exception that the message names.
    """
    # Suspension on either side counts: Kueue changes the template in the write that suspends or
    # resumes.
    return Immutable(
        (field,) if isinstance(field, str) else field,
        "must change only while the job is suspended" + (reason or " (runPolicy.suspend)"),
        f"{unchanged} || {unless}{_UNSUSPENDED}",
    )


def _read_at_start(location: Location, unchanged: str = "") -> Immutable:
    """Return the rule for a field that agents of torch backends read only at their start: agents
    started later would disagree."""
    path = ".".join(str(step) for step in location)
    return _immutable(
        location,
        unchanged or f"self.{path} == oldSelf.{path}",
        ", unless rendezvous.backend is Etcd",
        "self.rendezvous.backend == 'Etcd' || ",
    )


def _same_template() -> str:
    """Return CEL for an unchanged template.

    CEL compares lists that are merged by a key without their order. That of containers and
    variables has a meaning: init containers run one after another, and a variable refers to those
    before it. The indices are literals because Kubernetes 1.29 cannot bound the cost of a
    comparison of lists that `map` returns. Lengths are read once: the API server evaluates the rule
    at each write of a status, and each field on a path costs it microseconds.
    """
    pods, init = (".".join(map(str, location)) for location in (CONTAINERS, INIT_CONTAINERS))
    return (
        f"(self.template == oldSelf.template && {_same_order(pods)} && "
        f"(!has(self.{init}) || !has(oldSelf.{init}) || {_same_order(init)}))"
    )


def _same_order(containers: str) -> str:
    """Return CEL for an unchanged order of these containers and of the variables of each."""
    new, old = f"self.{containers}", f"oldSelf.{containers}"
    variables = f"{new}[c].env[a + b].name == {old}[c].env[a + b].name"
    return (
        f"[{new}.size()].all(m, {list(range(MAX_CONTAINERS))}.all(c, c >= m || "
        f"({new}[c].name == {old}[c].name && (!has({new}[c].env) || [{new}[c].env.size()].all(n, "
        f"{list(range(0, MAX_VARIABLES, _STRIDE))}.all(a, a >= n || "
        f"{list(range(_STRIDE))}.all(b, a + b >= n || {variables})))))))"
    )


_STRIDE = 32
"""Number of variables in a row, which keeps the rule short."""

_STARTED_WITH = " (runPolicy.suspend): running pods keep the value that they started with"


def _optional(path: str, absent: str) -> str:
    """Return CEL for an unchanged optional field, whose parents are set or absent too."""
    steps = path.split(".")

    def value(of: str) -> str:
        parents = [".".join([of, *steps[: end + 1]]) for end in range(len(steps))]
        there = " && ".join(f"has({parent})" for parent in parents)
        return f"({there} ? {parents[-1]} : {absent})"

    return f"{value('self')} == {value('oldSelf')}"


_SAME_MINIMUM = (
    "(has(self.minNodes) ? self.minNodes : self.maxNodes) == "
    "(has(oldSelf.minNodes) ? oldSelf.minNodes : oldSelf.maxNodes) || "
    "(!has(self.minNodes) && !has(oldSelf.minNodes))"
)

IMMUTABLE: tuple[Immutable, ...] = (
    _immutable("template", _same_template()),
    *(
        _immutable(name, f"self.{name} == oldSelf.{name}")
        for name in ("launch", "setup", "entrypoint")
    ),
    _immutable(
        "nprocPerNode",
        "(has(self.nprocPerNode) == has(oldSelf.nprocPerNode) && "
        "(!has(self.nprocPerNode) || self.nprocPerNode == oldSelf.nprocPerNode))",
    ),
    _immutable("trainer", _optional("trainer", "''")),
    _immutable("rendezvous", "self.rendezvous == oldSelf.rendezvous"),
    _immutable("recovery", "self.recovery == oldSelf.recovery", _STARTED_WITH),
    _immutable(
        PRIORITY_CLASS,
        _optional("runPolicy.schedulingPolicy.priorityClass", "''"),
        _STARTED_WITH,
    ),
    _read_at_start(("minNodes",), _SAME_MINIMUM),
    _read_at_start(("maxNodes",)),
    _read_at_start(("maxRestarts",)),
    _read_at_start(("elasticity", "scaleUp")),
    _read_at_start(("elasticity", "scaleUpMaxWaitSeconds")),
    _read_at_start(("elasticity", "settleSeconds")),
)

_ONCE_FOR_EACH_NODE = (
    "has(self.status) && has(self.status.launch) && self.status.launch.mode == 'PerNode'"
)
_IS_FINISHED = "has(self.status.phase) && self.status.phase in ['Succeeded', 'Failed']"
_IS_SUSPENDED = "self.spec.runPolicy.suspend || oldSelf.spec.runPolicy.suspend"
_HAS_TRAINED = (
    "has(self.status) && has(self.status.phase) && "
    "self.status.phase in ['Running', 'Restarting', 'Suspending']"
)
_SAME_STORE = " && ".join(
    (
        "self.spec.rendezvous.backend == oldSelf.spec.rendezvous.backend",
        "self.spec.rendezvous.endpoints == oldSelf.spec.rendezvous.endpoints",
        _optional("spec.rendezvous.secretName", "''"),
    )
)

IMMUTABLE_BY_STATUS: tuple[Immutable, ...] = (
    Immutable(
        ("spec", "maxNodes"),
        "must change from 1 only while the job is suspended (runPolicy.suspend): its command runs "
        "once for each node (status.launch.mode PerNode), and a pod that starts it as that of a "
        "single node may train alone",
        f"oldSelf.spec.maxNodes > 1 || self.spec.maxNodes == 1 || !({_ONCE_FOR_EACH_NODE}) || "
        f"({_IS_FINISHED}) || {_IS_SUSPENDED}",
    ),
    Immutable(
        ("spec", "rendezvous"),
        "must keep backend, endpoints and secretName until the suspension is complete "
        "(status.phase Suspended): until then pods may save, and need their store",
        f"({_SAME_STORE}) || !({_HAS_TRAINED})",
    ),
)
"""Rules of the whole object. On one node frameworks may start no torchrun, and launchers with a
rendezvous of their own run: the command would train alone beside the job's new nodes. The operator
reads and steers only the store that spec names: the checkpoint before a stop is requested there."""
