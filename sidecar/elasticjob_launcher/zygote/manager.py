"""Launcher's side of the zygote (standby interpreter): its state, and forking from it.

The zygote is started on the agent's request and restarted if it is lost or if it finds a
module that must not be preloaded. If restarts do not help, it is given up with a reason.
Modules that the workers import later are preloaded in a fork of the zygote, its successor, which
replaces it once they are loaded: until then the zygote can fork workers.
Waiting does not block the event loop; only a fork does, for milliseconds. Each worker is
requested separately and reports its own pid.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticjob_launcher.loop import Loop, Timer
from elasticjob_launcher.processes.output import Output
from elasticjob_launcher.processes.spawn import LaunchError
from elasticjob_launcher.settings import Limits
from elasticjob_launcher.zygote.command import ColdStart, Program, parse_command, require_forkable
from elasticjob_launcher.zygote.fork_requests import ForkedWorker, ForkRequest, request_forks
from elasticjob_launcher.zygote.preload_cache import ExtensionSchedule, PreloadCache
from elasticjob_launcher.zygote.process import ImportLimits, ZygoteEvents, ZygoteProcess, activity
from elasticjob_launcher.zygote.worker_environment import shared_variables

if TYPE_CHECKING:
    from elasticjob_launcher.wire import Prepare

# Limits until a load time has been measured; the first is about that of a worker.
START_WAIT_SECONDS = 5.0
MOST_START_WAIT_SECONDS = 20.0
LEAST_WAIT_SECONDS = 2.0
LEAD = 1 / 6
"""Part of a load that the zygote must be ahead of workers that would start cold: its checks of the
imports take some of it, and its workers share one import."""
STALLED_SECONDS = 2.0
"""Time without activity of the loading process after which workers do not wait for it."""
LOOK_SECONDS = 0.25
"""Interval of the checks of its activity."""
PRELOADING = "the standby is still preloading"
MOST_STARTS = 4
"""Maximum number of starts in a row; one more for each start that found a new exclusion."""
MOST_REFUSALS = 20
"""Maximum of that number, and of successors that are requested again without refused modules."""
REST_SECONDS = 600.0
"""Pause after that number of starts, then twice as long each time."""
SETTLED_SECONDS = 60.0
"""Time in the ready state after which earlier starts no longer count."""
MOST_ARGV_LETTERS = 200_000  # sent twice in one packet, together with the recorded modules


def wait_seconds(load_seconds: float, elapsed_seconds: float) -> float:
    """Return the maximum wait of workers for a zygote that has been loading for this time; 0 if
    they start sooner without it.

    Workers that start cold load the same modules, so they need about the duration of a load. A
    zygote without a lead brings nothing. One with a lead is waited for as long as a cold start
    takes, so that even a wait for nothing costs no more than a second cold start;
    `ZygoteManager` ends the wait sooner if the zygote stalls.

    Args:
        load_seconds: duration of the last load; 0 if unknown.
    """
    if not load_seconds:
        return min(max(elapsed_seconds, START_WAIT_SECONDS), MOST_START_WAIT_SECONDS)
    if load_seconds > LEAST_WAIT_SECONDS and elapsed_seconds < LEAD * load_seconds:
        return 0.0
    return max(load_seconds, LEAST_WAIT_SECONDS)


def refusal_lines(refused: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each reason and package; it counts the package's further modules."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, reason in refused.items():
        groups.setdefault((name.partition(".")[0], reason), []).append(name)
    for (package, reason), names in groups.items():
        others = len(names) - 1
        more = f" and {others} module{'s' * (others > 1)} of {package}" if others else ""
        yield f"{names[0]}{more}: {reason}"


class ZygoteState:
    """Zygote state: `OFF` was never requested, `LOADING` is preloading, `OVER` was given up."""

    OFF = "off"
    LOADING = "loading"
    READY = "ready"
    OVER = "over"


class ZygoteManager:
    """Zygote manager; `on_settled` is called once it is ready or given up, with the reason."""

    def __init__(
        self,
        loop: Loop,
        output: Output,
        base_env: Mapping[str, str],
        keep_fds: Sequence[int],
        limits: Limits,
        on_settled: Callable[[bool, str], None],
    ) -> None:
        self._loop = loop
        self._output = output
        self._base_env = base_env
        self._keep_fds = keep_fds
        self._on_settled = on_settled
        self._request: Prepare | None = None
        self._program: Program | None = None
        self._preload_cache = PreloadCache(None)
        self._process: ZygoteProcess | None = None
        self._successor: ZygoteProcess | None = None
        self._import_limits = ImportLimits(loop, limits)
        self._limits = limits
        self._second_try: Timer | None = None
        self._was_slow = False
        self._rest_seconds = REST_SECONDS
        self._extension_schedule = ExtensionSchedule(loop, self._extend)
        self._extensions_left = MOST_REFUSALS
        self._starts = 0
        self._most_starts = MOST_STARTS
        self._began = self._ready_since = 0.0
        self._load_seconds = 0.0
        self._workers = 1
        self._state = ZygoteState.OFF
        self._reason = "warm start was not requested"
        self._waiting: Callable[[], None] | None = None
        self._watching: Timer | None = None

    @property
    def is_requested(self) -> bool:
        return self._request is not None

    @property
    def settled(self) -> bool:
        """True if waiting longer would not change the state."""
        return self._state != ZygoteState.LOADING

    @property
    def reason(self) -> str:
        """Reason that prevents a fork now; empty if there is none."""
        return "" if self._state == ZygoteState.READY else self._reason

    def prepare(self, request: Prepare) -> None:
        """Prepare a zygote for these workers; an identical request keeps the existing one."""
        if request == self._request and self._state != ZygoteState.OFF:
            if self._state != ZygoteState.LOADING:
                over = self._state == ZygoteState.OVER
                self._on_settled(not over, self._reason if over else "")
            return
        self._end()
        self._request, self._was_slow, self._rest_seconds = request, False, REST_SECONDS
        self._starts, self._most_starts = 0, MOST_STARTS
        self._extensions_left = MOST_REFUSALS
        self._preload_cache = PreloadCache(Path(request.memory) if request.memory else None)
        env = {**self._base_env, **request.env}
        try:
            if sum(map(len, request.argv)) > MOST_ARGV_LETTERS:
                raise ColdStart(f"the command line is longer than {MOST_ARGV_LETTERS} letters")
            self._program = parse_command(request.argv, env.get("PATH", os.defpath))
            require_forkable(self._program, {**env, **self._program.env})
        except ColdStart as reason:
            self._give_up(str(reason))
            return
        self._preload_cache.read(self._program.key)
        self._start()

    def when_settled(self, then: Callable[[], None]) -> None:
        """Call back once: when ready, when given up, or when a cold start is faster."""
        elapsed = time.monotonic() - self._began
        seconds = 0.0 if self.settled else wait_seconds(self._load_seconds, elapsed)
        if not seconds:
            then()
            return
        self._waiting = then
        self._loop.call_later(seconds, lambda: self._wait_expired(then))
        self._watch_activity(then, time.monotonic(), None)

    def _watch_activity(self, then: Callable[[], None], since: float, before: int | None) -> None:
        """End the wait once the loading process has done nothing for `STALLED_SECONDS`."""
        if self._waiting is not then or self._process is None:
            return
        now, current = time.monotonic(), activity(self._process.pid)
        if current is None or current != before:
            since = now
        if now - since >= STALLED_SECONDS:
            module = self._import_limits.module
            self._reason = f"{PRELOADING}, stalled" + (f" at {module}" if module else "")
            self._end_wait()
            return
        self._watching = self._loop.call_later(
            LOOK_SECONDS, lambda: self._watch_activity(then, since, current)
        )

    def prepare_for(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Prepare a zygote for workers like this one from now on."""
        if self._request is not None:
            self.prepare(self._request._replace(argv=tuple(argv), env=shared_variables(env)))

    def difference(self, argv: Sequence[str], env: Mapping[str, str]) -> str:
        """Return the difference between a worker and the preloaded ones, or an empty string."""
        assert self._request is not None
        return self._request.difference(self._base_env, argv, env)

    def fork(self, requests: Sequence[ForkRequest]) -> list[ForkedWorker | str]:
        """Return a forked worker, or the reason for its absence, for each request."""
        assert self._program is not None
        self._drop_successor()  # its imports would delay the workers
        results = request_forks(self._pass_on, self._program, requests)
        lost = [result for result in results if isinstance(result, str)]
        if lost:
            self._lost(lost[0])
        else:
            self._workers = len(requests)
            self._extension_schedule.begin()
        return results

    def serve(self) -> int | None:
        """Request a store; return the descriptor that delivers its pid and port, or None.

        The caller closes the descriptor.
        """
        try:
            reader, writer = os.pipe()
        except OSError:  # too many open files
            return None
        try:
            self._pass_on({"do": "serve"}, [writer])
        except OSError:
            os.close(reader)
            return None
        finally:
            os.close(writer)
        return reader

    def reaped(self, pid: int, status: int) -> None:
        """Handle the end of a launcher child that is not a worker."""
        for process in (self._process, self._successor):
            if process is not None:
                process.reaped(pid, status)

    def _pass_on(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        if self._process is None:
            raise BrokenPipeError("it is not there")
        self._process.pass_on(message, fds)

    # --- life cycle

    def _start(self) -> None:
        request, wanted = self._request, self._program
        assert request is not None
        assert wanted is not None
        self._end()
        self._starts += 1
        self._began = time.monotonic()
        env = shared_variables({**self._base_env, **request.env, **wanted.env})
        try:
            process = self._process = ZygoteProcess.start(
                self._loop, self._output, wanted, env, self._keep_fds, self._events()
            )
        except LaunchError as error:
            self._give_up(error.message)
            return
        self._state = ZygoteState.LOADING
        self._reason = PRELOADING
        self._import_limits.begin(process.pid, "preloading", self._exceeded)
        process.send(
            {
                "do": "preload",
                "module": wanted.module,
                "target": wanted.target,
                "arguments": wanted.arguments,
                "command": wanted.command,
                "modules": list(request.modules),
                "learned": self._preload_cache.modules,
                "excluded": sorted(self._preload_cache.excluded),
            }
        )

    def _events(self) -> ZygoteEvents:
        return ZygoteEvents(self._handle_message, self._lost)

    def _handle_message(self, message: dict[str, Any]) -> None:
        kind = message["is"]
        if kind == "unfit":
            self._unfit(message["refused"], message["reason"])
            return
        if kind == "importing":
            self._import_limits.imports(message["module"])
            return
        if kind == "recorded":
            self._preload_cache.extend(message["names"])
            return
        self._load_seconds = self._loading_seconds()
        self._import_limits.end()
        if excess := self._import_limits.too_large():
            self._give_up(excess)
            return
        self._state, self._reason = ZygoteState.READY, ""
        self._ready_since = time.monotonic()
        self._end_wait()
        self._on_settled(True, "")

    def _loading_seconds(self) -> float:
        """Return the duration of this load, as an estimate of the next one's.

        A longer one than the limit of the processor time shared the processors with others.
        """
        return min(time.monotonic() - self._began, self._limits.seconds)

    def _unfit(self, refused: Mapping[str, str], reason: str) -> None:
        """Restart without the modules that must not be preloaded."""
        self._load_seconds = max(self._load_seconds, self._loading_seconds())
        if self._exclude(refused):
            self._most_starts = min(self._most_starts + 1, MOST_REFUSALS)
        self._end()
        if refused:
            self._restart(next(iter(refused.values())))
        else:
            self._give_up(f"the standby cannot be forked: {reason}")

    def _exclude(self, refused: Mapping[str, str]) -> bool:
        """Log and record the refused modules; return True if one of them is new."""
        for line in refusal_lines(refused):
            self._output.write_line(f"not preloaded: {line}")
        new = not self._preload_cache.excluded.issuperset(refused)
        self._preload_cache.exclude(refused)
        return new

    def _exclude_importing(self, reason: str) -> bool:
        """Exclude the module being imported if it is a recorded one; return True if it is new."""
        module = self._import_limits.module
        return module in self._preload_cache.modules and self._exclude({module: reason})

    def _lost(self, reason: str) -> None:
        if not self.settled:
            self._exclude_importing(reason)
        self._end()
        self._restart(reason)

    def _restart(self, reason: str) -> None:
        """Start another zygote, or give up after too many that did not become ready."""
        since = self._ready_since if self._state == ZygoteState.READY else time.monotonic()
        if time.monotonic() - since > SETTLED_SECONDS:
            self._starts, self._most_starts = 0, MOST_STARTS
        if self._starts < self._most_starts:
            self._start()
            if self._state == ZygoteState.LOADING and self._waiting is not None:
                self._reason = f"{PRELOADING}, again: {reason}"
                self._end_wait()  # the new process has no lead over a cold start
            return
        self._give_up(f"given up after {self._starts} standbys: {reason}")
        # The cause, such as a memory shortage, may be gone by then.
        self._second_try = self._loop.call_later(self._rest_seconds, self._retry_later)
        self._rest_seconds *= 2

    def _retry_later(self) -> None:
        self._starts, self._most_starts = 0, MOST_STARTS
        self._start()

    def _give_up(self, reason: str) -> None:
        self._end()
        self._state, self._reason = ZygoteState.OVER, reason
        self._on_settled(False, reason)
        self._end_wait()

    def _exceeded(self, reason: str, slow: bool) -> None:
        """Give up; try once more if only the time limit was exceeded.

        A first read of a disk or image is slow; by the second try the workers have read the same.
        """
        again = slow and not self._was_slow
        self._give_up(reason)
        if again:
            self._was_slow = True
            self._second_try = self._loop.call_later(self._limits.seconds, self._start)

    def _end(self) -> None:
        self._import_limits.end()
        if self._second_try is not None:
            self._second_try.cancel()
            self._second_try = None
        self._extension_schedule.end()
        self._drop_successor()
        if self._process is not None:
            process, self._process = self._process, None
            process.end()

    # --- successor

    def _extend(self) -> None:
        """Request a successor that imports what the workers have imported since."""
        if self._state != ZygoteState.READY or self._successor is not None:
            return
        assert self._process is not None
        excluded = sorted(self._preload_cache.excluded)
        message = {"do": "learn", "workers": self._workers, "excluded": excluded}
        events = ZygoteEvents(self._handle_successor_message, self._successor_lost)
        try:
            self._successor = self._process.request_successor(message, events)
        except OSError as error:
            self._output.write_line(f"the standby cannot load more: {error}")

    def _handle_successor_message(self, message: dict[str, Any]) -> None:
        kind, successor = message["is"], self._successor
        assert successor is not None
        if kind == "forked":
            self._import_limits.begin(successor.pid, "loading more", self._successor_exceeded)
        elif kind == "importing":
            self._import_limits.imports(message["module"])
        elif kind == "unfit":
            if not message["refused"]:
                self._output.write_line(f"the standby cannot load more: {message['reason']}")
            self._retry_without(message["refused"])
        elif excess := self._import_limits.too_large():
            self._successor_exceeded(excess, False)
        else:
            self._import_limits.end()
            assert self._process is not None
            successor.replace(self._process, self._events())
            self._process, self._successor = successor, None

    def _successor_lost(self, reason: str) -> None:
        module = self._import_limits.module
        self._retry_without({module: reason} if reason and module else {})

    def _successor_exceeded(self, reason: str, slow: bool) -> None:
        self._exclude_importing(reason)
        self._drop_successor()

    def _retry_without(self, refused: Mapping[str, str]) -> None:
        """End the successor; request another one if modules must not be preloaded."""
        self._drop_successor()
        if refused and self._exclude(refused) and self._extensions_left:
            self._extensions_left -= 1
            self._extend()

    def _drop_successor(self) -> None:
        if self._successor is not None:
            self._import_limits.end()
            successor, self._successor = self._successor, None
            successor.end()

    # --- waiting callers

    def _wait_expired(self, then: Callable[[], None]) -> None:
        if self._waiting is then:
            self._end_wait()

    def _end_wait(self) -> None:
        waiting, self._waiting = self._waiting, None
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        if waiting is not None:
            waiting()
