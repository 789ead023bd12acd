"""Watches of a member: on the keys that its part needs, and on the coordinator's key. No I/O.

The first opens before any read, so that the result of the read stays current; the second starts
right after the revision at which the coordinator was seen.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob_rendezvous.protocol.clock import Alarm
from elasticjob_rendezvous.protocol.effects import Effect, Unwatch, Watch
from elasticjob_rendezvous.protocol.kv import Range


@dataclass(slots=True)
class _Open:
    generation: int
    ranges: tuple[Range, ...]
    ready: bool = False
    revision: int = 0
    cluster_id: int = 0


@dataclass(slots=True)
class Watches:
    """Open watches of a member. Each watch has a new generation number."""

    main: _Open | None = None
    leader: _Open | None = None
    retry_at: float = 0.0
    _generation: int = 0

    @property
    def ready(self) -> bool:
        """True if the result of a read from now on will be kept up to date."""
        return self.main is not None and self.main.ready

    @property
    def reading_under(self) -> int:
        """Generation of the watch that keeps a read from now on up to date; 0 without one."""
        return self.main.generation if self.main is not None and self.main.ready else 0

    def kept(self, generation: int) -> bool:
        """Return True if a read that was sent under `generation` is still up to date."""
        return self.main is not None and self.main.generation == generation

    def opened(self, generation: int, revision: int, cluster_id: int) -> None:
        if self.main is not None and self.main.generation == generation:
            self.main.ready = True
            self.main.revision = revision
            self.main.cluster_id = cluster_id

    def has_another_past(self, generation: int, revision: int, cluster_id: int) -> bool:
        """Return True if the watch misses changes since a read: it is newer or on another etcd."""
        if self.main is None or not self.main.ready or not self.kept(generation):
            return False
        return self.main.revision > revision or self.main.cluster_id != cluster_id

    def holds(self, generation: int) -> bool:
        return any(
            watch is not None and watch.generation == generation
            for watch in (self.main, self.leader)
        )

    def broke(self, generation: int, retry_at: float) -> bool:
        """Drop a broken watch; return True if it belonged to this member."""
        if not self.holds(generation):
            return False
        if self.main is not None and self.main.generation == generation:
            self.main = None
        else:
            self.leader = None
        self.retry_at = retry_at
        return True

    def keep_main(self, ranges: tuple[Range, ...], now: float, alarm: Alarm) -> list[Effect]:
        """Return the effects to watch `ranges`; if there are any, all must be read again."""
        self.main, effects = self._keep(self.main, ranges, 0, now, alarm)
        return effects

    def keep_leader(self, key: str, revision: int, now: float, alarm: Alarm) -> list[Effect]:
        """Return the effects to watch the coordinator's key after `revision`; no key, no watch."""
        if not key:
            effects = _close(self.leader)
            self.leader = None
            return effects
        ranges = (Range(key),)
        self.leader, effects = self._keep(self.leader, ranges, revision + 1, now, alarm)
        return effects

    def drop(self) -> list[Effect]:
        effects = _close(self.main) + _close(self.leader)
        self.main = self.leader = None
        return effects

    def _keep(
        self,
        current: _Open | None,
        ranges: tuple[Range, ...],
        revision: int,
        now: float,
        alarm: Alarm,
    ) -> tuple[_Open | None, list[Effect]]:
        if current is not None and current.ranges == ranges:
            return current, []
        # Only a broken watch waits: one on other ranges cannot take the place of this one.
        if current is None and not alarm.passed(self.retry_at, now):
            return current, []
        self._generation += 1
        watch = Watch(self._generation, ranges, revision, deletions_only=revision > 0)
        effects = [*_close(current), watch]
        return _Open(self._generation, ranges), effects


def _close(watch: _Open | None) -> list[Effect]:
    return [] if watch is None else [Unwatch(watch.generation)]
