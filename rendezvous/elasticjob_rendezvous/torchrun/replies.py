"""Values of the keys in the store of torch's agents, derived from the roster. No I/O.

torch's agents negotiate their workers' ranks through a store that one of them hosts. Here the
sealed roster already assigns all ranks, also those of other kinds of agents, so every value is
known in advance.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster

ROLE_INFO = "torchelastic/role_info/"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
EXIT_BARRIER = "torchelastic/agent/terminal_state"
FINISHED = f"{EXIT_BARRIER}/num_members"
ALL_FINISHED = f"{EXIT_BARRIER}/last_member"


class Disagreement(Exception):
    """Mismatch between the workers of torch's agent and those its member announced."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Store contents as seen by one member of a sealed roster."""

    roster: Roster
    own: RankAssignment

    def get(self, key: str) -> bytes | None:
        """Return the value of a key that torch's agents share; None for an unknown key."""
        if assignment := self._seat(key, ROLE_INFO):
            return json.dumps(_role_info(assignment)).encode()
        if assignment := self._seat(key, ASSIGNED_RANKS):
            place = (
                assignment.base_rank,
                self.roster.world_size,
                assignment.role_base_rank,
                assignment.role_world_size,
            )
            return json.dumps(place).encode()
        return None

    def check(self, key: str, value: bytes) -> bool:
        """Return True if the key may be set: it is known and the value agrees with the roster.

        Raises:
            Disagreement: this node's agent describes its workers differently from the roster.
        """
        known = self.get(key)
        if known is None:
            return key == ALL_FINISHED
        if self._seat(key, ROLE_INFO) is self.own:
            _check_own(self.own, json.loads(value))
        return True

    def check_identical(self) -> None:
        """Verify that all nodes have the same slots and role as this one.

        torch assumes this with TORCH_ELASTIC_WORKER_IDENTICAL and exchanges no role info.

        Raises:
            Disagreement: a node differs.
        """
        for assignment in self.roster.seats:
            if (assignment.slots, assignment.role) != (self.own.slots, self.own.role):
                raise Disagreement(
                    "TORCH_ELASTIC_WORKER_IDENTICAL=1 is set, but this node runs "
                    f"{_workers(self.own)} and {assignment.name} {_workers(assignment)}: unset it"
                )

    def _seat(self, key: str, prefix: str) -> RankAssignment | None:
        number = key.removeprefix(prefix)
        if not key.startswith(prefix) or not (number.isascii() and number.isdigit()):
            return None
        rank = int(number)
        return self.roster.seats[rank] if rank < len(self.roster.seats) else None


def _role_info(assignment: RankAssignment) -> dict[str, str | int]:
    return {
        "role": assignment.role,
        "rank": assignment.group_rank,
        "local_world_size": assignment.slots,
    }


def _check_own(own: RankAssignment, published: dict[str, str | int]) -> None:
    if published == _role_info(own):
        return
    slots, role = published.get("local_world_size"), published.get("role")
    raise Disagreement(
        f"this node announced {_workers(own)}, but its agent runs {slots} of role {role!r}: "
        f"set --rdzv-conf slots={slots},role={role}"
    )


def _workers(assignment: RankAssignment) -> str:
    return f"{assignment.slots} worker{'s' * (assignment.slots != 1)} of role {assignment.role!r}"
