"""Kubernetes events of a job, computed from the status before and after a pass and its actions.

Comparing the two statuses avoids duplicate events, even after a restart of the operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from elasticjob_operator.domain.explain.catalog import DELETIONS, UNCHARGED_CLASSES, failure_meaning
from elasticjob_operator.domain.explain.changed_pods import lost_label_sentences, unowned_text
from elasticjob_operator.domain.explain.phrases import (
    restart_text,
    round_cause,
    saving_text,
    stop_report,
)
from elasticjob_operator.domain.manifests.template_warnings import WarningKind, warnings_of
from elasticjob_operator.domain.observed.state import Pod, StopReason
from elasticjob_operator.domain.plan.actions import (
    Action,
    CreatePod,
    DeletePod,
    DeleteReason,
    RemoveMembers,
    WriteNodes,
    WriteParams,
)
from elasticjob_operator.domain.plan.lifecycle import FINISHED, SUSPENSION
from elasticjob_operator.domain.status.conditions import NODE_UNREACHABLE, warnings_text
from elasticjob_operator.domain.status.failures import latest_failure
from elasticjob_operator.domain.status.rounds import (
    cold_text,
    phases_text,
    recovery_ms,
    recovery_text,
    seconds_text,
)
from elasticjob_operator.domain.status.set_aside import SetAside, set_aside_sentence
from elasticjob_operator.model.job import ElasticJob
from elasticjob_operator.model.status import Condition, FailureStatus, RoundStatus, Status
from elasticjob_operator.model.types import ConditionStatus, ConditionType, Phase
from elasticjob_rendezvous.protocol.records.members import CauseKind
from elasticjob_rendezvous.protocol.records.roster import natural_order

NAMED_PODS = 5
_STAMP = "%Y-%m-%dT%H:%M:%SZ"
TRACEBACK_LINES = 4
"""Lines of a traceback, from its end, in an event; the status has the whole traceback."""


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class Event:
    """One event: a reason in one CamelCase word, and a message for people.

    `deduplication_key` is unique among the job's events of this reason: an event with the same key
    is the same event, emitted again. Without a key every emission is a new event.
    """

    type: EventType
    reason: str
    message: str
    deduplication_key: str = ""


def job_events(before: Status, after: Status, applied: Iterable[Action]) -> tuple[Event, ...]:
    """Return the events of one pass, in order of occurrence."""
    return (
        *_launch(before, after),
        *_failure(before, after),
        *_actions(tuple(applied)),
        *_rounds(before, after),
        *_recoveries(before, after),
        *_conditions(before, after),
        *_stop(before, after),
        *_phase(before, after),
    )


def without_recent_changes(status: Status, since: datetime) -> Status:
    """Return the status without the changes since `since` whose events have a deduplication key.

    The operator that wrote the status may have died before it emitted events for rounds, their
    failure or the end; comparing with the result emits them again.
    """
    fresh = {found.round for found in status.rounds if _is_since(found.final_time, since)}
    ended = status.phase in FINISHED and _is_since(status.completion_time, since)
    failure = latest_failure(status)
    if failure is not None and _round_key(status, failure.round):
        changed = status.rendezvous is not None and _is_since(status.rendezvous.since, since)
        if ended or changed or any(number >= failure.round for number in fresh):
            failure = None
    return status.model_copy(
        update={
            "conditions": [
                condition
                for condition in status.conditions
                if not _is_fresh_warning(condition, since)
            ],
            "rounds": [found for found in status.rounds if found.round not in fresh],
            "first_failure": None if failure is None else status.first_failure,
            "last_failure": failure,
            "phase": None if ended else status.phase,
        }
    )


def _is_fresh_warning(condition: Condition, since: datetime) -> bool:
    is_warning = condition.type is ConditionType.TEMPLATE_WARNINGS
    return is_warning and _is_since(condition.last_transition_time, since)


def _is_since(at: datetime | None, since: datetime) -> bool:
    return at is not None and at >= since


def set_aside_event(aside: SetAside) -> Event:
    """Return the event for a job that the operator sets aside."""
    return Event(EventType.WARNING, aside.reason.value, set_aside_sentence(aside.text))


def template_warnings(job: ElasticJob, before: Status, after: Status) -> tuple[Event, ...]:
    """Return the events for the template's warnings, one of each kind, once they are in the status
    or have changed there. The generation makes each unique."""
    kind = ConditionType.TEMPLATE_WARNINGS
    was = next((condition for condition in before.conditions if condition.type is kind), None)
    now = next((condition for condition in after.conditions if condition.type is kind), None)
    if now is None or now.status is not ConditionStatus.TRUE or _same(was, now):
        return ()
    found = warnings_of(job)
    return tuple(
        Event(
            EventType.WARNING,
            reason.value,
            warnings_text(warning for warning in found if warning.kind is reason),
            f"generation {job.metadata.generation}",
        )
        for reason in WarningKind
        if any(warning.kind is reason for warning in found)
    )


def credentials_rotated(reason: str, user: str) -> Event:
    """Return the event for another etcd user of a job."""
    message = f"gave the job's agents new credentials, those of etcd's user {user}: {reason}"
    return Event(EventType.NORMAL, "CredentialsRotated", message, user)


def labels_lost(pod: Pod) -> Event:
    """Return the event for a pod whose labels were removed or changed."""
    return Event(EventType.WARNING, "LabelsLost", "; ".join(lost_label_sentences([pod])))


def owner_lost(pod: Pod) -> Event:
    """Return the event for a pod whose owner references were removed."""
    return Event(EventType.WARNING, "OwnerReferencesLost", unowned_text([pod]))


def fields_dropped(fields: Iterable[str]) -> Event:
    """Return the event for fields of the status that the CRD of the cluster lacks."""
    names = ", ".join(f"status.{field}" for field in fields)
    message = (
        f"the CRD of ElasticJob is older than the operator and lacks {names}: "
        "apply crds/elasticjobs.elasticjob.dev.yaml of the operator's release"
    )
    return Event(EventType.WARNING, "StatusFieldsDropped", message)


def status_refused(message: str) -> Event:
    """Return the event for a status that the API server refuses to store."""
    text = (
        f"the status cannot be written, and what it shows is outdated: {message}; let the policy, "
        "webhook or role admit the operator's writes of elasticjobs/status"
    )
    return Event(EventType.WARNING, "StatusRefused", text)


def write_refused(operation: str, message: str) -> Event:
    """Return the event for a request that the API server refuses, such as `patch
    poddisruptionbudgets ns/job`, without which the job goes on."""
    text = (
        f"the API server refuses to {operation}: {message}; let the quota, policy, webhook or role "
        "admit it"
    )
    return Event(EventType.WARNING, "WriteRefused", text)


def deletions_refused(kept: Mapping[str, str]) -> tuple[Event, ...]:
    """Return events for pods that the API server refuses to delete; `kept` maps names to error
    messages."""
    by_words: dict[str, list[str]] = {}
    for name, message in kept.items():
        by_words.setdefault(message.replace(f'"{name}"', "…"), []).append(name)
    return tuple(
        Event(
            EventType.WARNING,
            "DeletionRefused",
            f"{_names_text(names)} cannot be deleted: {message}",
        )
        for message, names in by_words.items()
    )


def settled_rounds(before: Status, after: Status) -> list[RoundStatus]:
    """Return the rounds whose cost became complete between the statuses, oldest first."""
    known = {found.round for found in before.rounds if _is_settled(before, found)}
    return [
        found for found in after.rounds if _is_settled(after, found) and found.round not in known
    ]


def stepped_rounds(before: Status, after: Status) -> list[RoundStatus]:
    """Return the rounds whose first step became known between the statuses, oldest first."""
    known = {found.round for found in before.rounds if found.first_step_ms is not None}
    return [
        found
        for found in after.rounds
        if found.first_step_ms is not None and found.round not in known
    ]


def _is_settled(status: Status, found: RoundStatus) -> bool:
    later = any(other.round > found.round for other in status.rounds)
    return found.start_ms is not None or later or status.phase in FINISHED


# -- launch


def _launch(before: Status, after: Status) -> Iterator[Event]:
    """Yield the decision how the command is launched, when it was made or changed."""
    text = _launch_text(after)
    if text and text != _launch_text(before):
        yield _normal("LaunchDecided", text)


def _launch_text(status: Status) -> str:
    return "" if status.launch is None else f"{status.launch.mode}: {status.launch.message}"


# -- actions


def _actions(applied: tuple[Action, ...]) -> Iterator[Event]:
    for action in applied:
        if isinstance(action, WriteNodes):
            yield _normal("NodesSet", f"spec.nodes follows maxNodes: {action.nodes}")
        elif isinstance(action, WriteParams) and action.bounds.closing is not None:
            reason = action.bounds.closing.outcome.reason
            yield _normal("SavingCheckpoint", saving_text(reason))
        elif isinstance(action, RemoveMembers):
            count = len(action.members)
            gone = "its pod is" if count == 1 else "their pods are"
            yield _normal(
                "MembersRemoved",
                f"{count} member{_plural(count)} removed from the rendezvous: {gone} gone",
            )
    created = [action.name for action in applied if isinstance(action, CreatePod)]
    if created:
        yield _normal("PodsCreated", f"created {_names_text(created)}")
    deleted: dict[DeleteReason, list[str]] = {}
    for action in applied:
        if isinstance(action, DeletePod):
            deleted.setdefault(action.reason, []).append(action.name)
    for reason, names in deleted.items():
        yield _normal("PodsDeleted", f"deleted {_names_text(names)}: {DELETIONS[reason]}")


# -- rounds and failures


def _rounds(before: Status, after: Status) -> Iterator[Event]:
    known = {found.round for found in before.rounds}
    for found in after.rounds:
        if found.round in known:
            continue
        cost = phases_text(found)
        message = f"round {found.round} is final with {found.nodes} node{_plural(found.nodes)}"
        text = f"{message}: {round_cause(found, after)}" + (f"; {cost}" if cost else "")
        yield _normal("RoundFinal", text, _round_key(after, found.round))


def _recoveries(before: Status, after: Status) -> Iterator[Event]:
    """Yield the total cost of each round after the first, once its workers run again."""
    for found in settled_rounds(before, after):
        spent = recovery_ms(found)
        if spent is not None and found.cause != CauseKind.START:
            cold = cold_text(found)
            yield _normal(
                "Recovered",
                f"round {found.round}: {round_cause(found, after)}; trains again on {found.nodes} "
                f"node{_plural(found.nodes)} after {seconds_text(spent)}: {recovery_text(found)}"
                + (f"; {cold}" if cold else ""),
                _round_key(after, found.round),
            )


def _failure(before: Status, after: Status) -> Iterator[Event]:
    failure, known = latest_failure(after), latest_failure(before)
    if failure is None:
        return
    if known is not None and failure == known.model_copy(update={"returned": failure.returned}):
        return  # of a lost node, only its return or its end became known
    deduplication_key = _round_key(after, failure.round)
    if failure.class_ in UNCHARGED_CLASSES:
        yield Event(EventType.WARNING, failure.class_, lost_node_text(failure), deduplication_key)
    else:
        yield Event(EventType.WARNING, "WorkerFailed", failure_text(failure), deduplication_key)


def lost_node_text(failure: FailureStatus) -> str:
    """Return one sentence for a lost or preempted node, none of whose workers failed."""
    where = f" on {failure.node}" if failure.node else ""
    detail = f": {failure.message}" if failure.message else ""
    then = {True: "; its agent has registered again", False: "; another pod takes its place"}
    after = "" if failure.returned is None else then[failure.returned]
    meaning = failure_meaning(failure)
    return f"{failure.pod}{where} was lost in round {failure.round}: {meaning}{detail}{after}"


def failure_text(failure: FailureStatus) -> str:
    """Return the culprit in one sentence, followed by the end of its traceback."""
    rank = "" if failure.rank is None else f"rank {failure.rank} "
    if failure.signal is not None:
        ending = f" by signal {failure.signal}"
    else:
        ending = "" if failure.exit_code is None else f" with exit code {failure.exit_code}"
    where = f" on {failure.node}" if failure.node else ""
    kind = f"{failure.class_}: " if failure.class_ else ""
    message = failure.message or "no message"
    text = f"{rank}({failure.pod}{where}) failed in round {failure.round}{ending}: {kind}{message}"
    lines = failure.traceback.strip().splitlines()[-TRACEBACK_LINES:]
    return "\n".join([text, *lines])


# -- conditions and phase

_WARNINGS = {
    ConditionType.NAME_CONFLICT: EventType.WARNING,
    ConditionType.TEMPLATE_INVALID: EventType.WARNING,
    ConditionType.NODES_REFUSED: EventType.WARNING,
}
_STARTING = "PodsStarting"


def _conditions(before: Status, after: Status) -> Iterator[Event]:
    old = {condition.type: condition for condition in before.conditions}
    for now in after.conditions:
        was = old.get(now.type)
        true = now.status is ConditionStatus.TRUE
        if now.type in _WARNINGS and true and not _same(was, now):
            yield Event(_WARNINGS[now.type], now.reason, now.message)
        if now.type is ConditionType.PODS_READY and _blocked(now) and not _same_reason(was, now):
            yield Event(EventType.WARNING, now.reason, now.message)
        unreachable = now.type is ConditionType.SUSPENDED and now.reason == NODE_UNREACHABLE
        if unreachable and not _same_reason(was, now):
            yield Event(EventType.WARNING, now.reason, now.message)
        if now.type is ConditionType.RENDEZVOUS_UNAVAILABLE and not _same(was, now):
            yield from _store(was, now)
        if now.type is ConditionType.RESIZING and now.message and not _same(was, now):
            yield _normal("Resizing", now.message)


def _store(was: Condition | None, now: Condition) -> Iterator[Event]:
    """Yield events for a rendezvous store that became unavailable, or available again."""
    if now.status is ConditionStatus.TRUE:
        yield Event(EventType.WARNING, now.reason, now.message)
    elif was is not None and was.status is ConditionStatus.TRUE and now.message:
        deduplication_key = f"{now.last_transition_time:{_STAMP}}"  # two messages may be equal
        yield _normal("RendezvousAvailable", now.message, deduplication_key)


def _blocked(condition: Condition) -> bool:
    """Return True if pods are not ready for a reason that a user can act on."""
    own_events = {kind.value for kind in _WARNINGS}
    plain = condition.reason == _STARTING or condition.reason.startswith("Job")
    unready = condition.status is ConditionStatus.FALSE
    return unready and not plain and condition.reason not in own_events


def _same(was: Condition | None, now: Condition) -> bool:
    return was is not None and (was.status, was.message) == (now.status, now.message)


def _same_reason(was: Condition | None, now: Condition) -> bool:
    """Return True for the same obstacle; the affected pods may change from pass to pass."""
    return was is not None and (was.status, was.reason) == (now.status, now.reason)


def _stop(before: Status, after: Status) -> Iterator[Event]:
    """Yield the checkpoint before a planned stop, or its absence."""
    report = stop_report(after.last_stop)
    if report is None or after.last_stop == before.last_stop:
        return
    if report.complete:
        yield _normal("Saved", report.text)
    else:
        yield Event(EventType.WARNING, "NotSaved", report.text)


def _phase(before: Status, after: Status) -> Iterator[Event]:
    if after.phase is before.phase or after.phase is None:
        return
    match after.phase:
        case Phase.PENDING:
            if before.phase in SUSPENSION:
                yield _normal("Resumed", "runPolicy.suspend is false again")
        case Phase.RUNNING:
            nodes = after.rendezvous.nodes if after.rendezvous else after.nodes
            yield _normal("Running", f"trains on {nodes} node{_plural(nodes)}")
        case Phase.RESTARTING:
            yield _normal("Restarting", restart_text(after) or "a new round is being formed")
        case Phase.SUSPENDING:
            yield _normal("Suspending", "runPolicy.suspend is true: its pods are being stopped")
        case Phase.SUSPENDED:
            yield _normal("Suspended", "runPolicy.suspend is true, and no pod is left")
        case Phase.DELETING:
            yield _normal("Deleting", "the job is being deleted: its pods are being stopped")
        case Phase.SUCCEEDED:
            yield _normal("Succeeded", "all workers ended with success", _end_key(after))
        case Phase.FAILED if not _is_deleted(after):
            yield Event(EventType.WARNING, "Failed", _end_text(after), _end_key(after))


def _is_deleted(status: Status) -> bool:
    """Return True if the job ended because it is deleted, which is not a failure."""
    failed = _failed(status)
    return failed is not None and failed.reason == StopReason.DELETED


def _failed(status: Status) -> Condition | None:
    """Return the condition Failed, if there is one."""
    return next((one for one in status.conditions if one.type is ConditionType.FAILED), None)


def _end_text(after: Status) -> str:
    failed = _failed(after)
    if failed is None:
        return "the job failed"
    return f"{failed.reason}: {failed.message}" if failed.message else failed.reason


def _end_key(status: Status) -> str:
    return "" if status.completion_time is None else f"{status.completion_time:{_STAMP}}"


def _round_key(status: Status, number: int) -> str:
    """Return the deduplication key of a round: its number and final time, since a resumed job
    counts its rounds from one again."""
    found = next((round_ for round_ in status.rounds if round_.round == number), None)
    if found is None or found.final_time is None:
        return ""
    return f"{number} {found.final_time:{_STAMP}}"


def _normal(reason: str, message: str, deduplication_key: str = "") -> Event:
    return Event(EventType.NORMAL, reason, message, deduplication_key)


def _names_text(names: list[str]) -> str:
    ordered = sorted(names, key=natural_order)
    more = len(ordered) - NAMED_PODS
    if more <= 0:
        return ", ".join(ordered)
    return f"{ordered[0]} … {ordered[-1]} ({len(ordered)})"


def _plural(count: int) -> str:
    return "" if count == 1 else "s"
