"""Start of a round's worker processes: forked from the zygote, or started cold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from .forking import Birth
from .spawn import LaunchError
from .standby import Standby
from .stores import Stores

if TYPE_CHECKING:
    from typing import Union

    from .spawn import Spawn, Spawned

    Result = Union[Spawned, LaunchError]


class Plan(NamedTuple):
    """Process to start."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    stdout_fd: int = -1
    stderr_fd: int = -1

    def to(self, fds: Sequence[int]) -> Plan:
        return self._replace(stdout_fd=fds[0], stderr_fd=fds[1])


class How(NamedTuple):
    """Results of the plans, in order; `cold_reason` is empty if all processes were forked."""

    processes: list[Result]
    cold_reason: str


class Starter:
    """Starter of worker processes; with `standby` None, all start cold."""

    def __init__(self, spawn: Spawn, standby: Standby | None, stores: Stores | None) -> None:
        self._spawn = spawn
        self._standby = standby
        self._stores = stores

    def when_able(self, plans: Sequence[Plan], then: Callable[[], None]) -> None:
        """Call back once there is nothing to wait for: at once, unless the zygote is loading.

        The wait costs nothing: the zygote loads modules that the workers would load themselves.
        """
        if self._standby is None or self._unsuited(plans):
            then()
        else:
            self._standby.when_settled(then)

    def start(self, plans: Sequence[Plan]) -> How:
        if self._stores is None:
            return self._started(plans)
        self._stores.starting([plan.env for plan in plans])
        how = self._started(plans)
        self._stores.refill()
        return how

    def _started(self, plans: Sequence[Plan]) -> How:
        reason = self._unsuited(plans)
        if self._standby is None or reason:
            how = How([self._cold(plan) for plan in plans], reason)
            if self._standby is not None and len({plan.argv for plan in plans}) == 1:
                self._standby.suit(plans[0].argv, plans[0].env)
            return how
        if self._standby.reason:
            return How([self._cold(plan) for plan in plans], self._standby.reason)
        births = [Birth(plan.env, plan.stdout_fd, plan.stderr_fd) for plan in plans]
        processes: list[Result] = []
        for plan, forked in zip(plans, self._standby.fork(births)):
            if isinstance(forked, str):
                reason = reason or forked
                processes.append(self._cold(plan))
            else:
                processes.append(forked)
        return How(processes, reason)

    def reaped(self, pid: int, status: int) -> None:
        if self._standby is not None:
            self._standby.reaped(pid, status)
        if self._stores is not None:
            self._stores.reaped(pid)

    def _cold(self, plan: Plan) -> Result:
        try:
            return self._spawn(plan.argv, plan.env, plan.stdout_fd, plan.stderr_fd)
        except LaunchError as error:
            return error

    def _unsuited(self, plans: Sequence[Plan]) -> str:
        """Return the reason why the zygote does not suit these workers; empty if it does."""
        if self._standby is None or not self._standby.asked_for:
            return "warm start is off"
        for plan in plans:
            unlike = self._standby.unlike(plan.argv, plan.env)
            if unlike:
                return unlike
        return ""
