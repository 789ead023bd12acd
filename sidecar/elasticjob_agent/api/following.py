"""An agent's rendezvous over any `RendezvousHandler`: ours, torch's, or a user's own.

`core.following` decides; here the handler's blocking calls are made, each in a thread of its
own, since nothing else ends one that waits for minutes.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, assert_never

from elasticjob_agent.api.calling import CALL_SECONDS, in_thread
from elasticjob_agent.api.finishing import AWAY_SECONDS, SEEK_SECONDS, ExitBarrier, unknown
from elasticjob_agent.api.looking import (
    ENDED_NOTE,
    FAILED_NOTE,
    LEFT_NOTE,
    kept_by_etcd,
    look,
    noted,
    trouble_of,
)
from elasticjob_agent.core.follow import follow
from elasticjob_agent.core.following import (
    CloseAll,
    Depart,
    Departed,
    Event,
    Following,
    Join,
    Joined,
    Meet,
    NoteFailure,
    NotJoined,
    Order,
    Phase,
    Seen,
    Terms,
    Told,
    Trouble,
    Waited,
)
from elasticjob_rendezvous.api import RendezvousTimeoutError
from elasticjob_rendezvous.core.events import Directive, Local
from elasticjob_rendezvous.core.records import Roster

log = logging.getLogger("elasticjob.agent")

DEPART_SECONDS = 5.0  # less than the agent itself waits to hear that it has left
LAST_JOIN_SECONDS = 1.0
NOTE_SECONDS = 1.0
CLOSE_SECONDS = 10.0
DEAF_LOOKS = 3
"""So many looks in vain from the exit barrier: the store went with the agent that hosted it."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a round: the roster that seats us, and the round's store if it has one."""

    roster: Roster
    store: Any


class Seeker(Protocol):
    """Gets a place; `SimpleElasticAgent` is one. Called in a thread."""

    def seek(self, charge: bool, restarts: int, least: int) -> Place:
        """Block until there is one, in a round numbered above `least`."""
        ...


class HandlerRendezvous:
    """See `agent.Rendezvous`.

    Args:
        handler: asked for everything but places.
        interval_seconds: between two looks at it.
        barrier_seconds: what the exit barrier may take; infinity: as long as the others work.
        stepped: is told of each step, the state before and after it.
    """

    def __init__(
        self,
        terms: Terms,
        handler: Any,
        seeker: Seeker,
        interval_seconds: float,
        barrier_seconds: float,
        stepped: Callable[[Following, Following], None] | None = None,
    ) -> None:
        self._stepped = stepped
        self._state = Following(terms)
        self._who = terms.member
        self._handler = handler
        self._seeker = seeker
        self._interval_seconds = interval_seconds
        self._barrier_seconds = barrier_seconds
        self._place: Place | None = None
        self._met_at = ""
        self._away_seconds = min(AWAY_SECONDS, barrier_seconds)
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._join: asyncio.Task[None] | None = None
        self._noting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None
        self.error: Exception | None = None
        """What the handler raised when it gave no place."""

    async def __aenter__(self) -> Self:
        self._go(self._look())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._closing is not None:  # the others wait for that word
            await asyncio.wait([self._closing], timeout=CLOSE_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def tell(self, local: Local) -> None:
        self._step(Told(local))

    async def directives(self) -> AsyncIterator[Directive]:
        last: Directive | None = None
        while True:
            if self._fault is not None:
                raise self._fault
            if self._state.directive != last:
                last = self._state.directive
                yield last
                continue
            self._changed.clear()
            await self._changed.wait()

    @property
    def registered(self) -> bool:
        """Whether we seek or have a place."""
        return self._state.phase not in (Phase.OUT, Phase.DEPARTING, Phase.OVER)

    @property
    def alone(self) -> bool:
        """Whether we ended as done without knowing of the others."""
        return self._state.alone

    # -- steps ----------------------------------------------------------------------

    def _step(self, event: Event) -> None:
        before = self._state
        self._state, orders = follow(before, event, time.monotonic())
        if self._stepped is not None:
            self._stepped(before, self._state)
        for order in orders:
            task = self._go(self._obey(order))
            match order:
                case Join():
                    self._join = task
                case NoteFailure():
                    self._noting = task
                case CloseAll():
                    self._closing = task
        self._changed.set()

    def _go(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._gone)
        return task

    def _gone(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = error
            self._changed.set()

    async def _obey(self, order: Order) -> None:
        match order:
            case Join():
                await self._seek(order)
            case NoteFailure(text):
                await self._note(FAILED_NOTE, text)
            case Meet():
                await self._meet()
            case CloseAll(text):
                await self._note(ENDED_NOTE, text)
                await self._called("set_closed", self._handler.set_closed)
            case Depart():
                await self._depart()
                self._step(Departed())
            case _:
                assert_never(order)

    async def _seek(self, order: Join) -> None:
        least, began = self._state.number, time.monotonic()
        if self._noting is not None:  # who sees that we wait should see why
            await asyncio.wait([self._noting], timeout=NOTE_SECONDS)
        try:
            place = await self._sought(order, least, began)
        except Exception as error:
            # A handler is a user's choice; whatever it raises is why there is no place.
            self.error = error
            log.info("no place in a round: %r", error)
            trouble = trouble_of(error)
            ended = await self._ended() if trouble is Trouble.CLOSED else ""
            self._step(NotJoined(trouble, f"{type(error).__name__}: {error}", ended))
            return
        self._place, self._met_at = place, ""
        self._step(Joined(place.roster))

    async def _ended(self) -> str:
        """The note in our last round's store that the job failed; empty without one."""
        place = self._place
        if place is None or place.store is None:
            return ""
        try:
            return await in_thread(lambda: noted(place.store, ENDED_NOTE), CALL_SECONDS)
        except Exception as error:
            log.warning("why the rendezvous was closed is not known: %r", error)
            return ""

    async def _sought(self, order: Join, least: int, began: float) -> Place:
        """A place, sought again where the handler outlives a loss of what keeps it."""
        limit_seconds = getattr(self._handler, "join_seconds", 0.0)
        while True:
            try:
                return await in_thread(
                    lambda: self._seeker.seek(order.charge, order.restarts, least)
                )
            except Exception as error:
                waited = time.monotonic() - began
                persists = getattr(self._handler, "persists", False)
                # Its store went, or whoever was to come to it did: the next round is another.
                if not persists or trouble_of(error) is not Trouble.ERROR:
                    raise
                if waited > limit_seconds:
                    raise RendezvousTimeoutError(str(error)) from error
                log.warning("a place in a round was lost again: %r", error)
            await asyncio.sleep(SEEK_SECONDS)

    async def _meet(self) -> None:
        """Come to the exit barrier. The looks then see whether all have: a store that waits is
        deaf to other questions."""
        place = self._place
        assert place is not None, "done without a place"
        if place.store is None:
            await self._meet_by_handler()
            return
        barrier = self._barrier(place)
        try:
            met_at = await barrier.arrived()
        except Exception as error:
            if self._place is place:
                # The store may have ended with the agent that hosted it, which was done then.
                log.warning("the exit barrier cannot be reached: %r", error)
                self._step(Waited(barrier.unknown(error)))
            return
        if self._place is not place:
            return
        self._met_at = met_at
        if math.isinf(self._barrier_seconds):
            log.info("done; waiting for the other agents")
            return
        log.info("done; waiting up to %g s for the other agents", self._barrier_seconds)
        await asyncio.sleep(self._barrier_seconds)
        if self._place is place:
            log.warning("other agents are not done after %g s", self._barrier_seconds)
            self._step(Waited())

    def _barrier(self, place: Place) -> ExitBarrier:
        def meeting() -> bool:
            return self._place is place and self._state.phase is Phase.MEETING

        return ExitBarrier(
            self._handler,
            place.store,
            [seat.id == self._who for seat in place.roster.seats],
            self._interval_seconds,
            self._away_seconds,
            meeting,
        )

    async def _meet_by_handler(self) -> None:
        """Without a store, the handler may know of the others' end, as v3's does."""
        handler = self._handler
        if not hasattr(handler, "report_done"):
            self._step(Waited())
            return
        try:
            await in_thread(handler.report_done, CALL_SECONDS)
            outcome = await in_thread(lambda: handler.wait_end(self._barrier_seconds))
        except Exception as error:
            log.warning("gave up waiting for the other agents: %r", error)
            self._step(Waited())
            return
        anew = Seen(waiting=1, failed="another node failed, and a newer round began")
        self._step(Seen(met=True) if outcome is not None else anew)

    async def _depart(self) -> None:
        """Tell the handler, if it knows how to leave without closing for all.

        torch's do not: their members find out.
        """
        leave = getattr(self._handler, "leave", None)
        if leave is None:
            return
        if self._state.number and self._state.terms.name:
            await self._note(LEFT_NOTE, self._state.terms.name, DEPART_SECONDS / 4)
        await self._called("leave", leave, DEPART_SECONDS / 2)
        if self._join is None or self._join.done():
            return
        await asyncio.wait([self._join], timeout=LAST_JOIN_SECONDS)
        if not self._join.done():
            await self._called("shutdown", self._handler.shutdown, DEPART_SECONDS / 4)

    async def _note(self, key: str, text: str, seconds: float = CALL_SECONDS) -> None:
        store = None if self._place is None else self._place.store
        if store is not None:
            await self._called(key, lambda: store.set(key, text.encode()), seconds)

    async def _called(
        self, what: str, call: Callable[[], object], seconds: float = CALL_SECONDS
    ) -> None:
        """A call whose failure changes nothing for us."""
        try:
            await in_thread(call, seconds)
        except Exception as error:
            log.warning("the rendezvous did not take %s: %r", what, error)

    # -- looking --------------------------------------------------------------------

    async def _look(self) -> None:
        deaf, deaf_since = 0, 0.0
        while True:
            await asyncio.sleep(self._interval_seconds)
            if self._state.phase not in (Phase.SEATED, Phase.MEETING):
                deaf = 0
                continue
            number = self._state.number
            try:
                seen = await in_thread(self._seen, CALL_SECONDS)
            except Exception as error:
                log.info("the rendezvous does not answer: %r", error)
                if self._state.phase is Phase.MEETING:
                    deaf_since = deaf_since if deaf else time.monotonic()
                    deaf += 1
                    self._deaf(deaf, time.monotonic() - deaf_since, error)
                continue
            deaf = 0
            if self._state.number == number:
                self._step(seen)

    def _deaf(self, looks: int, seconds: float, error: Exception) -> None:
        """What a store means that is gone while we are done: its host was done too, and ended.

        A host that stays until all have seen the end was lost: its round ends with it. An etcd
        that is away comes back.
        """
        if kept_by_etcd(self._handler):
            if seconds >= self._away_seconds:
                self._step(Waited(unknown(error, seconds)))
        elif looks >= DEAF_LOOKS:
            stays = getattr(self._handler, "host_stays", False)
            self._step(Seen(waiting=1, moved_on=True) if stays else Waited())

    def _seen(self) -> Seen:
        return look(self._handler, None if self._place is None else self._place.store, self._met_at)
