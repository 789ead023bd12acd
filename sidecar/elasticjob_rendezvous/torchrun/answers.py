"""What torch's agents ask each other through their store, answered from the roster. Pure.

torch's agents negotiate their workers' ranks through a store that one of them hosts. Here the
sealed roster has settled them, for agents that are not torch's as well, so every question has its
answer before it is asked.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from elasticjob_rendezvous.core.roster import Roster, Seat

ROLE_INFO = "torchelastic/role_info/"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
EXIT_BARRIER = "torchelastic/agent/terminal_state"
FINISHED = f"{EXIT_BARRIER}/num_members"
ALL_FINISHED = f"{EXIT_BARRIER}/last_member"


class Disagreement(Exception):
    """torch's agent runs other workers than its member of the rendezvous announced."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers for one member of a sealed roster."""

    roster: Roster
    own: Seat

    def get(self, key: str) -> bytes | None:
        """The value of a key that torch's agents share; None for one that is not answered here."""
        if seat := self._seat(key, ROLE_INFO):
            return json.dumps(_role_info(seat)).encode()
        if seat := self._seat(key, ASSIGNED_RANKS):
            place = (
                seat.base_rank,
                self.roster.world_size,
                seat.role_base_rank,
                seat.role_world_size,
            )
            return json.dumps(place).encode()
        return None

    def check(self, key: str, value: bytes) -> bool:
        """Whether a key may be set: it is one of ours, and the value what the roster says.

        Raises:
            Disagreement: this node's agent says other things of itself.
        """
        known = self.get(key)
        if known is None:
            return key == ALL_FINISHED
        if self._seat(key, ROLE_INFO) is self.own:
            _check_own(self.own, json.loads(value))
        return True

    def check_identical(self) -> None:
        """With TORCH_ELASTIC_WORKER_IDENTICAL torch asks nobody: all nodes must be alike.

        Raises:
            Disagreement: they are not.
        """
        for seat in self.roster.seats:
            if (seat.slots, seat.role) != (self.own.slots, self.own.role):
                raise Disagreement(
                    "TORCH_ELASTIC_WORKER_IDENTICAL=1 is set, but this node runs "
                    f"{_workers(self.own)} and {seat.name} {_workers(seat)}: unset it"
                )

    def _seat(self, key: str, prefix: str) -> Seat | None:
        number = key.removeprefix(prefix)
        if not key.startswith(prefix) or not (number.isascii() and number.isdigit()):
            return None
        rank = int(number)
        return self.roster.seats[rank] if rank < len(self.roster.seats) else None


def _role_info(seat: Seat) -> dict[str, str | int]:
    return {"role": seat.role, "rank": seat.group_rank, "local_world_size": seat.slots}


def _check_own(own: Seat, said: dict[str, str | int]) -> None:
    if said == _role_info(own):
        return
    slots, role = said.get("local_world_size"), said.get("role")
    raise Disagreement(
        f"this node announced {_workers(own)}, but its agent runs {slots} of role {role!r}: "
        f"give it --rdzv-conf slots={slots},role={role}"
    )


def _workers(seat: Seat) -> str:
    return f"{seat.slots} worker{'s' * (seat.slots != 1)} of role {seat.role!r}"
