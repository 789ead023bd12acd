"""Causes of rounds that the agents cannot know, derived from pods.

In a rendezvous of a torch backend (etcd-v2, c10d) the departure of a node only shows as "a node is
waiting". The pods show which node left or was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from elasticjob_operator.core.observed import GIVEN_UP, NodeState, Pod, PodPhase
from elasticjob_operator.core.rendezvous_view import RendezvousView
from elasticjob_rendezvous.core.costs import History
from elasticjob_rendezvous.core.records import Cause, CauseKind
from elasticjob_rendezvous.core.roster import natural_order

_WENT = (CauseKind.LEAVE, CauseKind.LOSS)
REMEMBERED_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class There:
    """A pod that takes part, and the last round in which it was observed."""

    pod: str
    round: int


@dataclass(frozen=True, slots=True)
class Went:
    """A pod that no longer takes part; `round` was its last one."""

    pod: str
    round: int
    kind: CauseKind


@dataclass(frozen=True, slots=True)
class Attendance:
    """Pods that take part, and pods that no longer do, by uid."""

    there: Mapping[str, There] = field(default_factory=dict)
    went: Mapping[str, Went] = field(default_factory=dict)

    def seen(self, pods: Iterable[Pod], view: RendezvousView) -> Attendance:
        """Return the attendance updated by an observation of the job."""
        oldest = view.round - REMEMBERED_ROUNDS
        kept = {uid: one for uid, one in self.went.items() if one.round >= oldest}
        present = {pod.uid: pod for pod in pods}
        rounds = {member.id: member.round for member in view.members}
        there: dict[str, There] = {}
        for uid, pod in present.items():
            before, kind = self.there.get(uid), _how(pod)
            if kind is None and pod.launcher_since is not None:
                last = max(rounds.get(uid, 0), before.round if before else 0)
                there[uid] = There(pod.name, last)
            elif kind is not None and before is not None:
                kept[uid] = Went(pod.name, before.round, kind)
        for uid in self.there.keys() - present.keys():
            gone = self.there[uid]
            kept[uid] = Went(gone.pod, gone.round, CauseKind.LOSS)
        return Attendance(there, kept)


def with_causes(
    view: RendezvousView, before: RendezvousView, gone: Iterable[Went]
) -> RendezvousView:
    """Return the view with causes corrected by departures; `before` is the view shown last."""
    known = {found.number: found.cause for found in before.rounds if found.cause.kind in _WENT}
    by_round: dict[int, list[Went]] = {}
    for one in gone:
        by_round.setdefault(one.round + 1, []).append(one)
    rounds = tuple(_better(found, known, by_round) for found in view.rounds)
    return replace(view, rounds=rounds, cause=_cause(view, before, by_round))


def _how(pod: Pod) -> CauseKind | None:
    """Return the kind of departure; None while the pod takes part or if it ended with its job."""
    if pod.terminating and pod.node_state is not NodeState.NOT_READY:
        return CauseKind.LEAVE
    killed = pod.phase is PodPhase.FAILED and pod.exit_code not in GIVEN_UP
    return CauseKind.LOSS if killed or pod.node_state is NodeState.NOT_READY else None


def _cause(
    view: RendezvousView, before: RendezvousView, gone: dict[int, list[Went]]
) -> Cause | None:
    if view.cause is None or not _doubtful(view.cause.kind):
        return view.cause
    if found := _others(gone.get(view.round, []), view.cause.kind, view.cause.members):
        return Cause(_kind(found), _names(found))
    told = before.cause
    same = before.round == view.round and told is not None and told.kind in _WENT
    return told if same else view.cause


def _better(found: History, known: dict[int, Cause], gone: dict[int, list[Went]]) -> History:
    if not _doubtful(found.cause.kind):
        return found
    if those := _others(gone.get(found.number, []), found.cause.kind, found.cause.members):
        return replace(found, cause=replace(found.cause, kind=_kind(those), members=_names(those)))
    if told := known.get(found.number):
        return replace(found, cause=told)
    return found


def _doubtful(cause: CauseKind) -> bool:
    """Return True if a departure may have caused this: agents only see joins and failures."""
    return cause in (CauseKind.JOIN, CauseKind.FAILURE)


def _others(gone: list[Went], cause: CauseKind, members: tuple[str, ...]) -> list[Went]:
    """Return the departures that explain the cause: they abort a peer's collective, but do not
    explain a failure of a departed pod itself."""
    own = cause is CauseKind.FAILURE and any(one.pod in members for one in gone)
    return [] if own else gone


def _kind(gone: list[Went]) -> CauseKind:
    lost = any(one.kind is CauseKind.LOSS for one in gone)
    return CauseKind.LOSS if lost else CauseKind.LEAVE


def _names(gone: list[Went]) -> tuple[str, ...]:
    return tuple(sorted((one.pod for one in gone), key=natural_order))
