"""Phrases for causes, obstacles and times, each defined once.

Events, status and `elasticjob explain` take their phrases from here and from `catalog`, so
that they agree.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime

from elasticjob_operator.domain.explain.catalog import DETAILS, PLURAL_DETAILS
from elasticjob_operator.domain.observed.state import (
    DISRUPTIONS,
    NodeState,
    Pod,
    PodEnd,
    StopReason,
)
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.status import (
    MAX_REASONS,
    MAX_ROUND_MEMBERS,
    CauseStatus,
    RendezvousStatus,
    RoundStatus,
    Status,
    StopStatus,
)
from elasticjob_operator.model.types import RendezvousState
from elasticjob_rendezvous.protocol.records.closing_checkpoint import SaveReport, SaveResult
from elasticjob_rendezvous.protocol.records.members import ABORTED, CauseKind, reasons_in_detail
from elasticjob_rendezvous.protocol.records.roster import natural_order
from elasticjob_rendezvous.protocol.text import first_line

MAX_NAMES = 5
"""Maximum number of pods named in a sentence, which must stay readable for a thousand pods."""
MAX_QUOTE = 240
"""Maximum length of quoted text of other programs, in characters."""
MAX_CAUSE = 480
"""Maximum length of an agent's detail, including its quotations, in characters."""

DEPARTURES = (CauseKind.LEAVE, CauseKind.PREEMPTION, CauseKind.LOSS, CauseKind.FAILURE)
"""Causes whose members departed, or may have; the ends of their pods are more precise."""


REASONED = (CauseKind.LEAVE, CauseKind.PREEMPTION, CauseKind.LOSS)
"""Causes whose reasons are listed one by one."""


_STOPS = {
    StopReason.SUSPENDED: "the job is suspended",
    StopReason.DEADLINE_EXCEEDED: "the job ends, because it was active for too long",
    StopReason.DELETED: "the job is deleted",
}


def saving_text(reason: str) -> str:
    """Return the text for workers that save before this stop of the job."""
    then = {stop.value: text for stop, text in _STOPS.items()}.get(reason, "the job is stopped")
    return f"its workers save a checkpoint, then {then}"


def stop_report(stop: StopStatus | None) -> SaveReport | None:
    """Return the report on the checkpoint before a planned stop; None if nothing was training."""
    known = {result.value: result for result in SaveResult}
    result = None if stop is None else known.get(stop.result)  # None if of a newer operator
    if stop is None or result is None or result is SaveResult.NOT_TRAINING:
        return None
    step = -1 if stop.step is None else stop.step
    saved = -1 if stop.checkpoint_step is None else stop.checkpoint_step
    if result is SaveResult.SAVE_FAILED:
        result = SaveResult.TIMED_OUT  # as in the record: its error makes the difference
    return SaveReport(result, step, saved, tuple(stop.unsaved), stop.error)


def stop_texts(status: Status) -> Iterator[str]:
    """Yield the sentence on the checkpoint before the last planned stop, if there was one."""
    report = stop_report(status.last_stop)
    if report is not None:
        yield report.text[0].upper() + report.text[1:]


def round_cause(found: RoundStatus, status: Status) -> str:
    """Return the cause of a round in the status, as text. All members are known only for the
    current round."""
    now = status.rendezvous
    cause = CauseStatus(
        kind=found.cause,
        members=found.members,
        reason=found.reason,
        detail=found.detail,
        reasons=found.reasons,
    )
    current = now.cause if now is not None and now.round == found.round else None
    if current is not None and set(found.members) <= set(current.members):
        return cause_text(cause.model_copy(update={"members": current.members}))
    return cause_text(cause, len(found.members) == MAX_ROUND_MEMBERS)


def restart_text(status: Status) -> str:
    """Return the reason for which a job that has trained is between two rounds, as text; empty if
    it is unknown.

    A job that was suspended and resumed before its status showed the suspension resumes. Its
    rendezvous is closed until then, and the last stop stays in the status until a round is final.
    A first round alone does not show that: all nodes may have been replaced, or etcd lost its data.
    """
    current, stop = status.rendezvous or RendezvousStatus(), status.last_stop
    is_suspended = stop is not None and stop.reason == StopReason.SUSPENDED
    cause = current.cause
    is_first = cause is None or cause.kind == CauseKind.START
    if current.state is RendezvousState.CLOSED or (is_suspended and is_first):
        return "the job resumes"
    return "" if cause is None else cause_text(cause)


def cause_text(cause: CauseStatus, cut: bool = False) -> str:
    """Return the cause of a round, as text. `cut`: True if the list of members may be cut off."""
    many = len(cause.members) > 1
    names = named(cause.members, cut) or "a node"
    reasons = _reasons(cause)
    detail = quoted(_detail_text(reasons, many) if reasons else cause.detail, MAX_CAUSE)
    suffix = f" ({detail})" if detail else ""
    if (
        cause.reason
        and cause.kind in DEPARTURES
        and not (many and _has_other_causes(cause.reason, reasons))
    ):
        return _departure_text(cause.reason, names, many)
    match cause.kind:
        case CauseKind.START:
            return f"the job starts{suffix}"
        case CauseKind.JOIN:
            return f"{names} joined{suffix}"
        case CauseKind.LEAVE:
            return f"{names} left{suffix}"
        case CauseKind.PREEMPTION:
            return f"{names} {_were(many)} preempted{suffix}"
        case CauseKind.LOSS:
            return f"{names} {_were(many)} lost{suffix}"
        case CauseKind.FAILURE:
            return f"{'workers' if many else 'a worker'} of {names} failed{suffix}"
        case CauseKind.SCALE_DOWN:
            return f"fewer nodes are wanted{suffix}"
        case CauseKind.UNCONFIRMED:
            return f"{names} did not confirm the round{suffix}"
        case CauseKind.MASTER_PORT:
            return f"the port of rank 0 was taken by another program{suffix}"
        case CauseKind.DATA_LOST:
            return f"etcd lost its data{suffix}"
        case other:
            return f"{other}{': ' + named(cause.members) if cause.members else ''}{suffix}"


def _reasons(cause: CauseStatus) -> Sequence[str]:
    """Return the reasons of a cause.

    They are in its detail alone if the previous release wrote the status, or if they are too many
    for the list; that release leaves the list of an earlier cause in place.
    """
    known = cause.reasons if cause.kind in REASONED else []
    if 0 < len(known) < MAX_REASONS:
        return known
    return reasons_in_detail(cause.kind, cause.detail) or known


def _has_other_causes(known: str, reasons: Iterable[str]) -> bool:
    """Return True if other members departed for other causes than the known one."""
    ends = {DISRUPTIONS[reason] for reason in reasons if reason in DISRUPTIONS}
    return bool(ends - {known})


def _departure_text(reason: str, names: str, many: bool) -> str:
    """Return the text for a departure whose cause is known from pods."""
    nodes = f"the nodes of {names}" if many else f"{names}'s node"
    match reason:
        case PodEnd.DRAINED:
            return f"{nodes} {_were(many)} drained"
        case PodEnd.PREEMPTED:
            return f"{names} {_were(many)} preempted for pods of higher priority"
        case PodEnd.EVICTED:
            short = "their nodes" if many else "its node"
            return f"{names} {_were(many)} evicted, because {short} ran short of something"
        case PodEnd.NODE_TAINTED:
            return f"{nodes} {_were(many)} tainted"
        case PodEnd.NODE_LOST:
            return f"{nodes} {_were(many)} lost"
        case PodEnd.OUT_OF_MEMORY:
            return f"{names} ran out of memory"
        case other:
            return f"{names} left ({other})"


def _detail_text(reasons: Iterable[str], many: bool) -> str:
    """Return the reasons of the members as text; each of several may have another reason."""
    known = {**DETAILS, **PLURAL_DETAILS} if many else DETAILS
    texts = {reason: known.get(reason, reason) for reason in reasons}
    also = texts.pop(ABORTED, "")
    return "; ".join(filter(None, ((", or " if many else "; ").join(texts.values()), also)))


def named(names: Iterable[str], cut: bool = False) -> str:
    """Join names: `job-0, job-1 and job-2`, or `job-0, …, job-4 and 3 more`.

    `cut`: True if the list may be cut off.
    """
    ordered = sorted(names, key=natural_order)
    more = f"{'at least ' if cut else ''}{len(ordered) - MAX_NAMES} more"
    return listed(ordered[:MAX_NAMES] + ([more] if len(ordered) > MAX_NAMES else []))


def listed(items: list[str]) -> str:
    """Join items: `a`, `a and b`, `a, b and c`."""
    return " and ".join([part for part in (", ".join(items[:-1]), *items[-1:]) if part])


def quoted(message: str, longest: int = MAX_QUOTE) -> str:
    """Return the first line of quoted text, shortened to `longest` characters."""
    return first_line(message, longest)


def pods_left(pods: Iterable[Pod]) -> str:
    """Return the reasons for which pods without running programs stay, or an empty text.

    Other pods are being stopped, which needs no explanation.
    """
    stuck, gone, unreachable, kept = [], [], [], []
    for pod in pods:
        if pod.node_gone and not pod.over:
            gone.append(pod)
        elif pod.stuck:
            stuck.append(_on_node(pod))
        elif is_unreachable(pod):
            unreachable.append(pod)
        elif pod.over and pod.terminating:
            kept.append(pod.name)
    clauses = []
    if stuck:
        clauses.append(
            f"the workers of {named(stuck)} cannot be ended before their disk answers or the "
            "machine restarts"
        )
    if gone:
        clauses.append(gone_nodes_text(gone))
    if unreachable:
        places = named(map(_on_node, unreachable))
        clauses.append(f"the kubelet of {places} does not answer ({_removal(unreachable)})")
    if kept:
        clauses.append(
            f"the kubelet or a finalizer keeps {named(kept)}, whose containers have ended"
        )
    if not clauses:
        return ""
    count = len(stuck) + len(gone) + len(unreachable) + len(kept)
    these = "this pod" if count == 1 else "these pods"
    return "; ".join([*clauses, f"a resumption does not wait for {these}"])


_OF_GARBAGE_COLLECTION = ("foregroundDeletion", "orphan")


def deletion_text(job: ElasticJob, pods: Collection[Pod]) -> str:
    """Return the state of a job that is being deleted: finalizers may keep it without pods."""
    found = (job.metadata.model_extra or {}).get("finalizers")
    others = [str(one) for one in found or () if one not in _OF_GARBAGE_COLLECTION]
    if pods or not others:
        return "The job is being deleted, and its pods are being stopped"
    finalizers = f"finalizer{'s' if len(others) > 1 else ''} {named(map(quoted, others))}"
    return (
        "The job is being deleted, and its pods are gone: it remains until its "
        f"{finalizers} {'are' if len(others) > 1 else 'is'} removed"
    )


def gone_nodes_text(pods: Sequence[Pod]) -> str:
    """Return the clause for pods whose Nodes were deleted: Kubernetes deletes them, too."""
    nodes = sorted({pod.node for pod in pods if pod.node}, key=natural_order)
    subject = f"the Node {nodes[0]}" if len(nodes) == 1 else f"the Nodes {named(nodes)}"
    its = "its pod" if len(pods) == 1 else "their pods" if len(nodes) > 1 else "its pods"
    verb = _were(len(nodes) > 1)
    return f"{subject} {verb} deleted: Kubernetes removes {its} within about a minute"


def is_unreachable(pod: Pod) -> bool:
    """Return True if a pod stays because the kubelet of its machine does not answer.

    The API server removes a pod that has ended without the kubelet.
    """
    there = not pod.stuck and not pod.over and not pod.node_gone
    return there and pod.node_state is NodeState.NOT_READY


def _on_node(pod: Pod) -> str:
    return f"{pod.name} on {pod.node}" if pod.node else pod.name


def _removal(pods: Sequence[Pod]) -> str:
    """Return the remedy for pods on unreachable machines. While a machine may still run, its pods
    may, too."""
    if len(pods) == 1 and pods[0].node:
        return (
            "once the machine is known to be off, run `kubectl delete node "
            f"{pods[0].node}` or `kubectl delete pod {pods[0].name} --force`"
        )
    return (
        "once their machines are known to be off, delete their Nodes, or the pods with "
        "`kubectl delete pod --force`"
    )


_COUNTED = re.compile(r"^\d+ ")


def unschedulable(message: str) -> str:
    """Extract the missing resources and constraints from the scheduler's message."""
    listing = message.partition("nodes are available: ")[2].partition(". ")[0] or message
    parts = [_COUNTED.sub("", part.strip(" .")) for part in listing.split(", ")]
    return quoted(", ".join(dict.fromkeys(parts)))


def time_text(when: datetime) -> str:
    return f"at {clock(when)}"


def clock(when: datetime) -> str:
    return f"{when:%H:%M:%S} UTC on {when:%Y-%m-%d}"


def sentence(text: str) -> str:
    """Return the text with a full stop at its end."""
    text = text.strip()
    return text if text.endswith((".", "!", "?", "…")) else f"{text}."


def _were(many: bool) -> str:
    return "were" if many else "was"
