"""Round log of a run: members and costs of every round, kept longer than in etcd."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pydantic.alias_generators import to_camel

from elasticjob_operator.domain.observed.etcd_records import Records
from elasticjob_operator.domain.status.rounds import SHARED, round_status, utc_time
from elasticjob_operator.model.status import RoundStatus
from elasticjob_rendezvous.protocol.records.roster import Roster
from elasticjob_rendezvous.protocol.records.timings import History


class RoundLog:
    """Log of every round that became final in this run, by number."""

    def __init__(self, began_ms: int) -> None:
        self._began_ms = began_ms
        self._rounds: dict[int, dict[str, Any]] = {}

    def take(
        self,
        found: Records,
        rounds: Iterable[History] = (),
        shown: Iterable[RoundStatus] = (),
    ) -> bool:
        """Add the rounds in the records; return True if anything is new.

        `rounds` are those of the view, whose causes the ends of pods may have corrected, `shown`
        those of the status, which may have lost steps that no record has.
        """
        changed, causes = False, {one.number: one.cause for one in rounds}
        lost = {one.round: one.lost_steps for one in shown if one.lost_steps is not None}
        for number, history in found.histories.items():
            roster, cause = found.rosters.get(number), causes.get(number, history.cause)
            if roster is None:
                continue
            if cause.kind is not history.cause.kind:
                history = replace(history, cause=cause)
            if history.lost_steps is None:
                known = self._rounds.get(number, {}).get("lostSteps")
                history = replace(history, lost_steps=lost.get(number, known))
            entry = self._entry(history, roster)
            changed = changed or self._rounds.get(number) != entry
            self._rounds[number] = entry
        return changed

    def rounds(self) -> list[dict[str, Any]]:
        """Return the rounds, oldest first, in the form of `rounds.json`."""
        return [self._rounds[number] for number in sorted(self._rounds)]

    def seated(self, pod: str) -> bool:
        """Return True if a pod was ever in a round."""
        return any(
            assignment["pod"] == pod
            for item in self._rounds.values()
            for assignment in item["seats"]
        )

    def ranks(self, number: int) -> dict[str, str]:
        """Return the ranks of each pod in a round, such as `2` or `2-3`."""
        entry = self._rounds.get(number)
        return (
            {assignment["pod"]: _ranks_text(assignment) for assignment in entry["seats"]}
            if entry
            else {}
        )

    def _entry(self, history: History, roster: Roster) -> dict[str, Any]:
        cause = history.cause
        return {
            "round": history.number,
            "cause": cause.kind.value,
            "members": list(cause.members),
            "detail": cause.detail,
            **{to_camel(name): getattr(history, name) for name in SHARED},
            "recoveryMs": round_status(history, "").recovery_ms,
            "finalTime": _stamp(history.final_ms),
            "worldSize": roster.world_size,
            "restarts": roster.restarts,
            "finalSeconds": round((history.final_ms - self._began_ms) / 1000, 3),
            "seats": [
                {
                    "pod": assignment.name,
                    "groupRank": assignment.group_rank,
                    "baseRank": assignment.base_rank,
                    "slots": assignment.slots,
                }
                for assignment in roster.seats
            ],
        }


def _stamp(utc_ms: int) -> str | None:
    """Return a time as in container logs, with milliseconds."""
    at = utc_time(utc_ms)
    return None if at is None else f"{at:%Y-%m-%dT%H:%M:%S}.{utc_ms % 1000:03}Z"


def _ranks_text(assignment: dict[str, Any]) -> str:
    first, slots = assignment["baseRank"], assignment["slots"]
    return str(first) if slots == 1 else f"{first}-{first + slots - 1}"
