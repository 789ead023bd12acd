"""Rendezvous of an agent over any `RendezvousHandler`: ElasticJob's, torch's or a user's own.

`core.poll_step` decides; this module makes the handler's blocking calls, each in a thread of its
own, since a call that waits for minutes cannot be interrupted otherwise. It leaves notes to
the other agents in the round's store; their delivery is best effort.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Self, assert_never

from elasticjob_agent.core.poll_step import (
    CloseAll,
    Depart,
    Departed,
    EnterExitBarrier,
    Event,
    Join,
    Joined,
    JoinTrouble,
    LocalChanged,
    NoteFailure,
    NotJoined,
    Order,
    Phase,
    Polled,
    PollingState,
    PollingTerms,
    poll_step,
)
from elasticjob_agent.polling.exit_barrier import ExitBarrier
from elasticjob_agent.polling.join import Place, RoundJoiner, join_round, read_outcome
from elasticjob_agent.polling.poll import ENDED_NOTE, FAILED_NOTE, LEFT_NOTE, poll_round, trouble_of
from elasticjob_agent.threads import CALL_SECONDS, in_thread
from elasticjob_rendezvous.protocol.directives import Directive, Idle
from elasticjob_rendezvous.protocol.effects import Note
from elasticjob_rendezvous.protocol.store_health import Failed
from elasticjob_rendezvous.protocol.store_trouble import StoreTrouble
from elasticjob_rendezvous.protocol.worker_group import Local
from elasticjob_rendezvous.store_monitor import StoreMonitor, StoreProbe

log = logging.getLogger("elasticjob.agent")

DEPART_SECONDS = 5.0  # shorter than the agent's own wait for its departure
LAST_JOIN_SECONDS = 1.0


async def call_best_effort(
    message: str, call: Callable[[], object], seconds: float = CALL_SECONDS
) -> None:
    """Make a blocking call; log its error instead of raising it."""
    try:
        await in_thread(call, seconds)
    except TimeoutError as error:
        log.warning(
            "cannot send %s to the rendezvous: %s",
            message, str(error) or f"its store did not answer within {seconds:g} s",
        )  # fmt: skip
    except Exception as error:
        log.warning("cannot send %s to the rendezvous: %r", message, error)


async def write_note(
    place: Place | None, key: str, text: str, seconds: float = CALL_SECONDS
) -> None:
    """Write a note to the store of this node's round, if there is one."""
    store = None if place is None else place.store
    if store is not None:
        await call_best_effort(key, lambda: store.set(key, text.encode()), seconds)


async def leave_round(
    handler: Any, place: Place | None, name: str, join: asyncio.Task[None] | None
) -> None:
    """Leave through the handler, if it can leave without closing the rendezvous for all.

    torch's handlers cannot: the other members detect the loss. `name` is written to the round's
    store as the leave note, unless it is empty. `join` is a running join, which is to end.
    """
    leave = getattr(handler, "leave", None)
    if leave is None:
        return
    if name:
        await write_note(place, LEFT_NOTE, name, DEPART_SECONDS / 4)
    await call_best_effort("leave", leave, DEPART_SECONDS / 2)
    if join is None or join.done():
        return
    await asyncio.wait([join], timeout=LAST_JOIN_SECONDS)
    if not join.done():
        await call_best_effort("shutdown", handler.shutdown, DEPART_SECONDS / 4)


NOTE_SECONDS = 1.0
CLOSE_SECONDS = 10.0


class HandlerRendezvous:
    """Adapter of a handler to the agent's `Rendezvous` port.

    Args:
        terms: constants of this agent.
        handler: rendezvous handler, polled for changes.
        joiner: joins rounds.
        interval_seconds: polling interval.
        barrier_seconds: maximum wait in the exit barrier; infinity waits as long as others work.
        stepped: called after each step with the state before and after it.
    """

    def __init__(
        self,
        terms: PollingTerms,
        handler: Any,
        joiner: RoundJoiner,
        interval_seconds: float,
        barrier_seconds: float,
        stepped: Callable[[PollingState, PollingState], None] | None = None,
    ) -> None:
        self._stepped = stepped
        self._state = PollingState(terms)
        self._member = terms.member
        self._handler = handler
        self._joiner = joiner
        self._interval_seconds = interval_seconds
        self._barrier_seconds = barrier_seconds
        self._place: Place | None = None
        self._done: ExitBarrier | None = None
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._join: asyncio.Task[None] | None = None
        self._noting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._fault: BaseException | None = None
        self._silent_since: float | None = None
        found: StoreProbe | None = getattr(handler, "store_probe", None)
        self._monitor = None if found is None else self._monitored(found)
        self._probing: asyncio.Future[Failed | None] | None = None
        self.departed = False
        """True if this node has tried to leave the rendezvous."""
        self.error: Exception | None = None
        """Exception that the handler raised instead of giving a place."""

    async def __aenter__(self) -> Self:
        self._go(self._poll())
        if self._monitor is not None:
            self._go(self._monitor.run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._closing is not None:  # the other nodes wait for the job's end
            await asyncio.wait([self._closing], timeout=CLOSE_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def report(self, local: Local) -> None:
        self._step(LocalChanged(local))

    async def directives(self) -> AsyncIterator[Directive]:
        last: Directive | None = None
        while True:
            if self._fault is not None:
                raise self._fault
            if self._directive != last:
                last = self._directive
                yield last
                continue
            self._changed.clear()
            await self._changed.wait()

    @property
    def _directive(self) -> Directive:
        """Current directive; while joining, an idle node reports trouble of the store instead."""
        directive, trouble = self._state.directive, self.trouble
        joining = self._state.phase is Phase.JOINING and isinstance(directive, Idle)
        return Idle(trouble.waiting) if joining and trouble is not None else directive

    @property
    def trouble(self) -> StoreTrouble | None:
        """Problem with the rendezvous store; None while it is usable or its state is unknown."""
        return None if self._monitor is None else self._monitor.trouble

    @property
    def live_until(self) -> float | None:
        """None, no deadline: no lease limits the others' wait before a new round."""
        return None

    def on_evidence(self, renewed: Callable[[], None]) -> None:
        """Do nothing: there is no deadline to extend."""

    @property
    def registered(self) -> bool:
        """True if this node seeks or has a place in a round."""
        return self._state.phase not in (Phase.OUT, Phase.DEPARTING, Phase.OVER)

    @property
    def alone(self) -> bool:
        """True if this node ended as done and the state of the others is unknown."""
        return self._state.alone

    # -- steps ----------------------------------------------------------------------

    def _step(self, event: Event) -> None:
        before = self._state
        self._state, orders = poll_step(before, event, time.monotonic())
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

    def _go(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
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
                await self._join_round(order)
            case NoteFailure(text):
                await write_note(self._place, FAILED_NOTE, text)
            case EnterExitBarrier():
                await self._meet()
            case CloseAll(text):
                await write_note(self._place, ENDED_NOTE, text)
                await call_best_effort("set_closed", self._handler.set_closed)
            case Depart():
                state = self._state
                name = state.terms.name if state.number else ""
                await leave_round(self._handler, self._place, name, self._join)
                self.departed = True
                self._step(Departed())
            case _:
                assert_never(order)

    async def _join_round(self, order: Join) -> None:
        least = self._state.number
        if self._noting is not None:  # nodes that see this one wait should also find its note
            await asyncio.wait([self._noting], timeout=NOTE_SECONDS)
        try:
            place = await join_round(self._handler, self._joiner, order, least)
        except Exception as error:
            # Handlers may be user code: any exception is the reason for having no place.
            self.error = error
            log.info("cannot join a round: %r", error)
            trouble = trouble_of(error)
            ended = trouble is JoinTrouble.CLOSED or trouble is JoinTrouble.LEFT
            outcome = await read_outcome(self._handler, self._place) if ended else None
            self._step(NotJoined(trouble, f"{type(error).__name__}: {error}", outcome))
            return
        self._place, self._done = place, None
        self._step(Joined(place.roster))

    async def _meet(self) -> None:
        place = self._place
        assert place is not None, "done without a place"

        def meeting() -> bool:
            return self._place is place and self._state.phase is Phase.MEETING

        self._done = ExitBarrier(
            self._handler,
            place,
            self._member,
            self._interval_seconds,
            self._barrier_seconds,
            meeting,
        )
        event = await self._done.met()
        if event is not None and meeting():
            self._step(event)

    # -- polling --------------------------------------------------------------------

    async def _poll(self) -> None:
        failed_polls, failing_since = 0, 0.0
        while True:
            await asyncio.sleep(self._interval_seconds)
            if self._state.phase not in (Phase.SEATED, Phase.MEETING):
                failed_polls = 0
                continue
            number = self._state.number
            try:
                seen = await in_thread(self._seen, CALL_SECONDS)
            except Exception as error:
                self._silent(error)
                if self._state.phase is Phase.MEETING:
                    failing_since = failing_since if failed_polls else time.monotonic()
                    failed_polls += 1
                    self._polls_failed(failed_polls, time.monotonic() - failing_since, error)
                continue
            failed_polls = 0
            self._answered()
            if self._state.number == number:
                self._step(seen)

    def _silent(self, error: Exception) -> None:
        """Log a failed poll: once per outage, and at debug level if the monitor reports it."""
        first = self._silent_since is None
        self._silent_since = time.monotonic() if first else self._silent_since
        level = logging.WARNING if first and self._monitor is None else logging.DEBUG
        log.log(level, "%s: the rendezvous does not answer: %r", self._state.terms.name, error)

    def _answered(self) -> None:
        since, self._silent_since = self._silent_since, None
        if since is not None and self._monitor is None:
            seconds = time.monotonic() - since
            name = self._state.terms.name
            log.info("%s: the rendezvous answers again after %.1f s", name, seconds)

    def _monitored(self, found: StoreProbe) -> StoreMonitor:
        async def probe(seconds: float) -> Failed | None:
            """Probe the store, one call at a time; wait again for a call that hangs."""
            if self._probing is None:
                self._probing = asyncio.ensure_future(in_thread(lambda: found.ask(seconds)))
            try:
                answer = await asyncio.shield(self._probing)
            except asyncio.CancelledError:
                raise
            except BaseException:
                self._probing = None
                raise
            self._probing = None
            return answer

        return StoreMonitor(
            found.store, found.endpoint, probe, lambda trouble: self._changed.set(), self._log_note
        )

    def _log_note(self, note: Note) -> None:
        if self._state.phase is not Phase.OVER:
            level = logging.WARNING if note.warning else logging.INFO
            log.log(level, "%s: %s", self._state.terms.name, note.text)

    def _polls_failed(self, failures: int, seconds: float, error: Exception) -> None:
        event = None if self._done is None else self._done.failed_polls(failures, seconds, error)
        if event is not None:
            self._step(event)

    def _seen(self) -> Polled:
        place, done = self._place, self._done
        if place is None:
            return poll_round(self._handler, None, "")
        met_at = "" if done is None else done.met_at
        return poll_round(self._handler, place.store, met_at, len(place.roster.seats))
