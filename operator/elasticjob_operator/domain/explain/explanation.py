"""Explanation of a job in sentences: state, missing nodes with remedies, last round, failure.

Computed from the object and its pods alone, so that the operator's status and the command line
agree. Each sentence stands alone. Times are absolute, so that the text does not change with
time. A blocker is a reason for which a wanted node is missing from a round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from elasticjob_operator.domain.explain.blockers import Blocker, find_blockers
from elasticjob_operator.domain.explain.catalog import OBSTACLES
from elasticjob_operator.domain.explain.changed_pods import lost_label_sentences, unowned_sentences
from elasticjob_operator.domain.explain.history import (
    failure_sentences,
    goodput_sentences,
    interruption_sentences,
)
from elasticjob_operator.domain.explain.phrases import (
    MAX_CAUSE,
    cause_text,
    clock,
    deletion_text,
    listed,
    named,
    pods_left,
    quoted,
    restart_text,
    sentence,
    stop_texts,
    time_text,
)
from elasticjob_operator.domain.manifests.names import pod_name
from elasticjob_operator.domain.observed.state import Obstacle, Pod, StopReason
from elasticjob_operator.domain.plan.backends import STORE_INDEX, is_steered
from elasticjob_operator.domain.plan.lifecycle import STOPPING, awaits_resumption
from elasticjob_operator.domain.plan.sizes import Clamp, legal_sizes, wanted_size
from elasticjob_operator.domain.status.conditions import refusal_of, shows_saving
from elasticjob_operator.domain.status.deletion_refusal import deletion_sentences
from elasticjob_operator.domain.status.missing_store import store_absence_sentences
from elasticjob_operator.domain.status.nodes_condition import nodes_sentences
from elasticjob_operator.domain.status.set_aside import set_aside_message, set_aside_sentence
from elasticjob_operator.domain.status.snapshots import place_sentences
from elasticjob_operator.domain.status.store_condition import store_sentences
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.status import CauseStatus, RendezvousStatus, Status
from elasticjob_operator.model.types import (
    Backend,
    ConditionStatus,
    ConditionType,
    Phase,
    RendezvousState,
    ScaleUp,
)
from elasticjob_rendezvous.protocol.coordinator.repeated_losses import HeldBack
from elasticjob_rendezvous.protocol.records.members import CauseKind
from elasticjob_rendezvous.protocol.text import counted

_ETCD_OBSTACLES = (
    Obstacle.ENDPOINT,
    Obstacle.SECRET,
    Obstacle.BACKEND,
    Obstacle.FOREIGN_ETCD,
    Obstacle.RECORDS,
)
"""Obstacles whose own sentence explains the unknown rendezvous."""


def explanation(job: ElasticJob, pods: Iterable[Pod]) -> tuple[str, ...]:
    """Return the sentences: state, missing nodes with remedies, last round, failure."""
    known = sorted(pods, key=lambda pod: pod.index)
    aside = set_aside_message(job)
    texts = [
        *([set_aside_sentence(aside)] if aside else []),
        *_state(job, known),
        *deletion_sentences(job.status),
        *nodes_sentences(job),
        *_changed_pods(job, known),
        *_stuck(known),
        *interruption_sentences(job.status),
        *goodput_sentences(job.status),
        *failure_sentences(job),
    ]
    return tuple(dict.fromkeys(map(sentence, texts)))


def _state(job: ElasticJob, pods: list[Pod]) -> Iterator[str]:
    status = job.status
    if job.metadata.deletion_timestamp is not None:
        yield deletion_text(job, pods)
        return
    if status.phase is not Phase.INTERRUPTED:
        yield from store_sentences(job)
        yield from _unreadable(job)
        yield from store_absence_sentences(status)
    match status.phase:
        case None:
            yield (
                "The operator has not processed the job yet: if this lasts, check that it runs "
                "and serves this namespace"
            )
        case Phase.PENDING:
            yield from _no_round(job, pods, "Not training yet")
        case Phase.RESTARTING:
            because = restart_text(status) or cause_text(CauseStatus(kind=CauseKind.START))
            yield from _no_round(job, pods, f"Between two rounds, because {because}")
        case Phase.RUNNING:
            yield from _saving(status)
            yield from _running(job, pods)
        case Phase.SUSPENDING | Phase.SUSPENDED:
            yield _suspended(job, status.phase, pods)
            yield from _refused_resumption(job, status.phase)
            yield from stop_texts(status)
        case Phase.SUCCEEDED:
            yield f"Succeeded{_ended_at(status)}: every worker ended with success"
        case Phase.FAILED:
            yield _failed(job)
            yield from stop_texts(status)
        case Phase.DELETING:
            yield deletion_text(job, pods)
            yield from stop_texts(status)
        case Phase.INTERRUPTED:
            pass  # the command line prints the remedy


def _changed_pods(job: ElasticJob, pods: list[Pod]) -> Iterator[str]:
    """Yield the consequences of labels and owner references that were removed from pods."""
    if job.status.phase not in STOPPING and job.metadata.deletion_timestamp is None:
        active = [pod for pod in pods if pod.active]
        yield from lost_label_sentences(active)
        yield from unowned_sentences(job, active)


def _stuck(pods: list[Pod]) -> Iterator[str]:
    """Yield a sentence for each pod whose workers the kernel does not end."""
    for pod in pods:
        if pod.stuck:
            where = f" on {pod.node}" if pod.node else ""
            yield sentence(f"{pod.name}{where} was given up: {quoted(pod.stuck)}")


def _unreadable(job: ElasticJob) -> Iterator[str]:
    status, refusal = job.status, refusal_of(job.status)
    elsewhere = refusal is not None and refusal[0] in _ETCD_OBSTACLES
    unknown = _current(status).state is RendezvousState.UNKNOWN
    if status.rendezvous is None or not unknown or status.phase in STOPPING or elsewhere:
        return
    source = "its etcd" if job.spec.rendezvous.backend is Backend.ETCD else "its agents"
    yield (
        f"The operator cannot read the job's state from {source}: the last known state follows; "
        "running workers continue"
    )


# -- no final round -----------------------------------------------------------------


def _no_round(job: ElasticJob, pods: list[Pod], begin: str) -> Iterator[str]:
    """Yield the nodes that have joined and those that are missing, while no round is final."""
    status, current = job.status, _current(job.status)
    if current.state is RendezvousState.FROZEN:
        are = "is" if current.nodes == 1 else "are"
        yield f"{begin}: {counted(current.nodes, 'node')} {are} confirming the round"
        return
    joined = frozenset(m.pod for m in status.members if m.state == "waiting")
    stopping = [m.pod for m in status.members if m.state in ("running", "stopping")]
    leaving = frozenset(m.pod for m in status.members if m.state == "leaving")
    reasons = find_blockers(status, pods, joined | leaving | frozenset(stopping))
    clauses = [reason.clause for reason in reasons]
    if stopping:
        its = "their" if len(stopping) > 1 else "its"
        clauses.insert(0, f"{named(stopping)} {_stop(stopping)} {its} workers")
    wanted, least = status.wanted_nodes, job.spec.min_nodes
    have = "has" if wanted == 1 else "have"
    need = f" (at least {least} {'are' if least > 1 else 'is'} needed)" if least < wanted else ""
    text = f"{begin}: {current.waiting} of {counted(wanted, 'node')} {have} joined{need}"
    yield text + (f"; {listed(clauses)}" if clauses else "")
    yield from _remedies(reasons)
    if current.state is RendezvousState.SETUP:
        yield f"No agent has reached {_store_name(job)} yet"
        return
    if not clauses and least <= current.waiting < wanted and status.phase is Phase.PENDING:
        yield (
            f"The round starts with these if no further node joins for "
            f"{job.spec.rendezvous.last_call_seconds} s"
        )


def _store_name(job: ElasticJob) -> str:
    """Return the name of a rendezvous store that is not the operator's etcd."""
    endpoints = job.spec.rendezvous.endpoints
    if endpoints:
        return f"the rendezvous at {listed(endpoints)}"
    return f"the store of the rendezvous in {pod_name(job.metadata.name, STORE_INDEX)}"


def _stop(names: list[str]) -> str:
    return "stop" if len(names) > 1 else "stops"


def _remedies(reasons: list[Blocker]) -> Iterator[str]:
    yield from dict.fromkeys(reason.remedy for reason in reasons if reason.remedy)


# -- final round --------------------------------------------------------------------


def _running(job: ElasticJob, pods: list[Pod]) -> Iterator[str]:
    status, current = job.status, _current(job.status)
    where = f"round {current.round}, {counted(current.world_size, 'worker')}"
    waiting = [m.pod for m in status.members if m.rank is None and m.state == "waiting"]
    seated = _seated(status)
    if not seated and current.state is RendezvousState.FINAL:
        yield from _unregistered(status, pods, where)
    else:
        yield from _training(status, pods, where, seated | frozenset(waiting))
    yield from _waiting(job, waiting)
    yield from _training_details(job)
    done = [member.pod for member in status.members if member.state == "done"]
    if done:
        yield f"{named(done)} {'have' if len(done) > 1 else 'has'} finished, the others not yet"


def _seated(status: Status) -> frozenset[str]:
    """Return the pods in the round: if no rank is known, those that have or had its workers."""
    ranked = frozenset(member.pod for member in status.members if member.rank is not None)
    states = ("running", "stopping", "done")
    return ranked or frozenset(m.pod for m in status.members if m.state in states)


def _training(
    status: Status, pods: list[Pod], where: str, present: frozenset[str]
) -> Iterator[str]:
    """Yield the size of the round, and the reasons for missing nodes with their remedies."""
    nodes, wanted = _current(status).nodes, status.wanted_nodes
    reasons = find_blockers(status, pods, present) if nodes < wanted else []
    if nodes >= wanted:
        extra = f", one of which is surplus: {wanted} are wanted" if nodes == wanted + 1 else ""
        if nodes > wanted + 1:
            extra = f", of which {nodes - wanted} are surplus: {wanted} are wanted"
        whole = "its only node" if nodes == 1 else f"all {nodes} nodes"
        yield f"Training on {whole if nodes == wanted else counted(nodes, 'node')} ({where}){extra}"
    else:
        clauses = listed([reason.clause for reason in reasons])
        text = f"Training on {nodes} of {counted(wanted, 'node')} ({where})"
        yield text + (f" because {clauses}" if clauses else "")
    yield from _remedies(reasons)


def _unregistered(status: Status, pods: list[Pod], where: str) -> Iterator[str]:
    """Yield the reason for which no node of the round is known: it may have no workers any more."""
    nodes = _current(status).nodes
    which = "Its only node is" if nodes == 1 else f"Its {nodes} nodes are"
    reasons = find_blockers(status, pods, frozenset(pod.name for pod in pods if pod.ready))
    clauses = [
        "the sidecars are gone, or have too little processor time or no network",
        *(reason.clause for reason in reasons),
    ]
    yield (
        f"{which} not registered at present ({where}), and the workers end within half a minute if "
        f"that lasts: {listed(clauses)}"
    )
    yield from _remedies(reasons)


def _training_details(job: ElasticJob) -> Iterator[str]:
    """Yield stragglers, avoided machines, the placement, and a clamped size."""
    status = job.status
    for slow in status.stragglers:
        where = f" on {slow.node}" if slow.node else ""
        yield f"{slow.pod}{where} has been slower than its peers since {clock(slow.since)}"
    for node in status.avoided_nodes:
        yield (
            f"New pods avoid {node.node} until {clock(node.until)}, because it failed the job "
            f"{node.reason}"
        )
    yield from place_sentences(status)
    yield from _clamped(job)


def _waiting(job: ElasticJob, waiting: list[str]) -> Iterator[str]:
    """Yield the reasons that keep waiting nodes out of the round."""
    current, sizes = _current(job.status), legal_sizes(job.spec)
    held = {node.pod: node for node in current.held_back if node.pod in waiting}
    larger = any(
        size in sizes for size in range(current.nodes + 1, current.nodes + 1 + len(waiting))
    )
    if current.nodes >= job.status.wanted_nodes or not larger:
        held = {}
    for node in held.values():
        yield HeldBack(node.pod, node.losses, node.seconds, node.delay_seconds).text
    if held and job.spec.elasticity.scale_up is ScaleUp.AFTER_CHECKPOINT:
        wait = "wait" if len(held) > 1 else "waits"
        most = job.spec.elasticity.scale_up_max_wait_seconds
        yield f"{named(list(held))} then {wait} for the next checkpoint, for at most {most} s"
    rest = [pod for pod in waiting if pod not in held]
    if rest:
        yield _standby(job, rest)


def _standby(job: ElasticJob, waiting: list[str]) -> str:
    """Return the reason that keeps waiting nodes out of the round."""
    names, nodes = named(waiting), _current(job.status).nodes
    wait = "wait" if len(waiting) > 1 else "waits"
    sizes = legal_sizes(job.spec)
    larger = any(size in sizes for size in range(nodes + 1, nodes + len(waiting) + 1))
    if nodes >= job.status.wanted_nodes:
        stand = "stand" if len(waiting) > 1 else "stands"
        return f"{names} {stand} by: the job has the wanted number of nodes"
    if not larger:
        step = job.spec.node_increment
        return f"{names} {wait} for more nodes: the job grows by {step} at a time (nodeIncrement)"
    if job.spec.elasticity.scale_up is ScaleUp.AFTER_CHECKPOINT:
        most = job.spec.elasticity.scale_up_max_wait_seconds
        return f"{names} {wait} for the next checkpoint, for at most {most} s"
    return f"{names} {'have' if len(waiting) > 1 else 'has'} joined and will be in the next round"


_CLAMPED = {
    Clamp.BELOW_MIN_NODES: "less than minNodes",
    Clamp.ABOVE_MAX_NODES: "more than maxNodes",
    Clamp.BETWEEN_INCREMENTS: "not minNodes and a multiple of nodeIncrement",
}


def _clamped(job: ElasticJob) -> Iterator[str]:
    size = wanted_size(job)
    if size.clamp is not None:
        yield (
            f"spec.nodes asks for {size.requested}, which is {_CLAMPED[size.clamp]}: "
            f"{size.nodes} {'are' if size.nodes > 1 else 'is'} wanted instead"
        )


# -- suspended or failed ------------------------------------------------------------


def _refused_resumption(job: ElasticJob, phase: Phase) -> Iterator[str]:
    """Yield the reason for which a job to be resumed can have no pods, and its remedy."""
    refusal = refusal_of(job.status) if awaits_resumption(job, phase) else None
    if refusal is not None:
        obstacle, message = refusal
        yield f"No pods can be created: {quoted(message)}"
        if remedy := OBSTACLES[obstacle].remedy:
            yield remedy


def _suspended(job: ElasticJob, phase: Phase, pods: list[Pod]) -> str:
    left, when = [pod.name for pod in pods], "runPolicy.suspend is false again"
    if awaits_resumption(job, phase) and not is_steered(job):
        when = "its pods have stopped"
    elif awaits_resumption(job, phase):
        unknown = _current(job.status).state is RendezvousState.UNKNOWN
        when = "its etcd can be read" if unknown else "its suspension is complete and recorded"
    text = f"{phase}: it resumes from its last checkpoint once {when}"
    if not left:
        return text
    text += f"; {named(left)} {'are' if len(left) > 1 else 'is'} still being stopped"
    reasons = pods_left(pods)
    return f"{text}: {reasons}" if reasons else text


def _saving(status: Status) -> Iterator[str]:
    """Yield the stop before which the workers save."""
    if shows_saving(status):
        yield "The workers save a checkpoint before the job is stopped"


def _failed(job: ElasticJob) -> str:
    """Return the failure and its reason, taken from condition Failed."""
    status = job.status
    found = next((c for c in status.conditions if c.type is ConditionType.FAILED), None)
    reason, message = (
        ("", "") if found is None else (found.reason, quoted(found.message, MAX_CAUSE))
    )
    if found is not None and found.status is not ConditionStatus.TRUE:
        reason, message = "", ""
    begin = f"Failed{_ended_at(status)}"
    if reason == StopReason.DEADLINE_EXCEEDED:
        most = job.spec.run_policy.active_deadline_seconds
        limit = f" than {most} s (runPolicy.activeDeadlineSeconds)" if most else ""
        return f"{begin}: it was active for longer{limit}"
    if reason in (StopReason.SUSPENDED, StopReason.DELETED, "Stopped"):
        return f"{begin}: it was stopped from outside" + (f" ({message})" if message else "")
    return f"{begin}: {message}" if message else begin


def _ended_at(status: Status) -> str:
    return f" {time_text(status.completion_time)}" if status.completion_time else ""


def _current(status: Status) -> RendezvousStatus:
    return status.rendezvous or RendezvousStatus()
