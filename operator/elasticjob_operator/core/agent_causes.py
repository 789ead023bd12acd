"""Why a round began, where the agents cannot know: who is gone from a rendezvous of torch's kind
only shows as "somebody waits". Whoever looks at the pods knows who went, and how.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from elasticjob_operator.core.observed import GIVEN_UP, NodeState, Pod, PodPhase
from elasticjob_operator.core.rendezvous_view import CauseView, RendezvousView, RoundView
from elasticjob_rendezvous.core.records import CauseKind
from elasticjob_rendezvous.core.roster import natural_order

_WENT = (CauseKind.LEAVE, CauseKind.LOSS)
REMEMBERED_ROUNDS = 10


@dataclass(frozen=True, slots=True)
class There:
    """A pod that takes part, and the last round that it was seen to."""

    pod: str
    round: int


@dataclass(frozen=True, slots=True)
class Went:
    """A pod that has ceased to take part; `round` was its last one."""

    pod: str
    round: int
    kind: CauseKind


@dataclass(frozen=True, slots=True)
class Attendance:
    """Which pods take part, by uid, and which have ceased to."""

    there: Mapping[str, There] = field(default_factory=dict)
    went: Mapping[str, Went] = field(default_factory=dict)

    def seen(self, pods: Iterable[Pod], view: RendezvousView) -> Attendance:
        """The same after a look at the job."""
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
    """The view with what is known better of the causes of its rounds; `before` was shown last."""
    known = {found.round: found for found in before.rounds if found.cause in _WENT}
    by_round: dict[int, list[Went]] = {}
    for one in gone:
        by_round.setdefault(one.round + 1, []).append(one)
    rounds = tuple(_better(found, known, by_round) for found in view.rounds)
    return replace(view, rounds=rounds, cause=_cause(view, before, by_round))


def _how(pod: Pod) -> CauseKind | None:
    """How it ceased to take part; None while it does, or when it has ended with its job."""
    if pod.terminating and pod.node_state is not NodeState.NOT_READY:
        return CauseKind.LEAVE
    killed = pod.phase is PodPhase.FAILED and pod.exit_code not in GIVEN_UP
    return CauseKind.LOSS if killed or pod.node_state is NodeState.NOT_READY else None


def _cause(
    view: RendezvousView, before: RendezvousView, gone: dict[int, list[Went]]
) -> CauseView | None:
    if view.cause is None or not _doubtful(view.cause.kind):
        return view.cause
    if found := _others(gone.get(view.round, []), view.cause.kind, view.cause.members):
        return CauseView(_kind(found), _names(found))
    told = before.cause
    same = before.round == view.round and told is not None and told.kind in _WENT
    return told if same else view.cause


def _better(
    found: RoundView, known: dict[int, RoundView], gone: dict[int, list[Went]]
) -> RoundView:
    if not _doubtful(found.cause):
        return found
    if those := _others(gone.get(found.round, []), found.cause, found.members):
        return replace(found, cause=_kind(those), members=_names(those))
    if told := known.get(found.round):
        return replace(found, cause=told.cause, members=told.members, detail=told.detail)
    return found


def _doubtful(cause: str) -> bool:
    """Whether somebody who went may be behind it: agents see who waits, and whose worker failed."""
    return cause in (CauseKind.JOIN, CauseKind.FAILURE)


def _others(gone: list[Went], cause: str, members: tuple[str, ...]) -> list[Went]:
    """Those whose going explains the cause: a peer's aborted collective, but no own failure."""
    own = cause == CauseKind.FAILURE and any(one.pod in members for one in gone)
    return [] if own else gone


def _kind(gone: list[Went]) -> str:
    lost = any(one.kind is CauseKind.LOSS for one in gone)
    return (CauseKind.LOSS if lost else CauseKind.LEAVE).value


def _names(gone: list[Went]) -> tuple[str, ...]:
    return tuple(sorted((one.pod for one in gone), key=natural_order))
