"""The launcher's side of the standby interpreter: what state it is in, and forking from it.

Owns that process. It is started when the agent asks for it, started again when it was lost or when
it found that something must not be preloaded, and given up, with a reason, when that does not help.
Waiting for it is the loop's; only a fork itself, a matter of milliseconds, holds the loop up.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .allowance import Allowance
from .command import Cold, Program, program
from .learned import Learned
from .loop import Loop, Timer
from .output import Output
from .ranks import shared
from .settings import Limits
from .shown import ROOM, ROOM_VALUE
from .spawn import LaunchError, spawn
from .stream import WorkerStream

if TYPE_CHECKING:
    from .requests import Prepare

START_WAIT_SECONDS = 20.0
FORK_SECONDS = 5.0
# After a start: when workers have loaded what they load at first, and what they load later.
LEARN_AFTER_SECONDS = (3.0, 10.0, 60.0)
MOST_STARTS = 4
SETTLED_SECONDS = 60.0
PACKET_BYTES = 1 << 20
PREFIX = b"[standby] "

# Runs this package from where it is, then forgets it: a program may have modules of these names.
BOOT = """
import sys
def begin():
    import importlib.machinery, importlib.util
    folder, package, fd = sys.argv[1:4]
    spec = importlib.machinery.PathFinder.find_spec(package, [folder])
    before = set(sys.modules)
    if hasattr(spec.loader, "exec_module"):
        sys.modules[package] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:  # of a zip file, before Python 3.10
        spec.loader.load_module(package)
    main = importlib.import_module(package + ".standbymain")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == package:
            del sys.modules[name]
    return main.worker(int(fd)), main.mainmodule.show_only_the_program
run, shown = begin()
def whole():
    try:
        run()
    except BaseException as error:
        shown(error)
        raise
whole()
"""
BOOT_LINE = f"exec(compile({BOOT!r}, '<string>', 'exec'), {{'__name__': 'elasticjob'}})"


class Forked:
    """A worker that the standby forked; this launcher is its parent."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None


class Birth(NamedTuple):
    """What one worker is to be given; the descriptors stay the caller's."""

    env: Mapping[str, str]
    stdout_fd: int
    stderr_fd: int


class StandbyState:
    """`OFF` was never asked for; `LOADING` has something under way; `OVER` was given up."""

    OFF = "off"
    LOADING = "loading"
    READY = "ready"
    LEARNING = "learning"
    OVER = "over"


class Standby:
    """`on_settled` is called when it became ready or was given up, with the reason."""

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
        self._asked: Prepare | None = None
        self._program: Program | None = None
        self._memory = Learned(None)
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._stream: WorkerStream | None = None
        self._allowance = Allowance(loop, limits)
        self._second_try_seconds = limits.seconds
        self._second_try: Timer | None = None
        self._was_slow = False
        self._learn_timer: Timer | None = None
        self._starts = 0
        self._began = 0.0
        self._workers = 1
        self._state = StandbyState.OFF
        self._reason = "warm start was not asked for"
        self._waiting: Callable[[], None] | None = None
        self.on_able: Callable[[], object] = lambda: None
        """Called when it can fork again after it has learned."""

    @property
    def asked_for(self) -> bool:
        return self._asked is not None

    @property
    def settled(self) -> bool:
        """Whether waiting longer would change nothing."""
        return self._state not in (StandbyState.LOADING, StandbyState.LEARNING)

    @property
    def reason(self) -> str:
        """Why it cannot fork now; empty when it can."""
        return "" if self._state == StandbyState.READY else self._reason

    def prepare(self, asked: Prepare) -> None:
        """Have one for these workers. Asked again for the same, what is there stays."""
        if asked == self._asked and self._state != StandbyState.OFF:
            if self._state != StandbyState.LOADING:
                over = self._state == StandbyState.OVER
                self._on_settled(not over, self._reason if over else "")
            return
        self._end()
        self._asked, self._starts, self._was_slow = asked, 0, False
        self._memory = Learned(Path(asked.memory) if asked.memory else None)
        env = {**self._base_env, **asked.env}
        try:
            self._program = program(asked.argv, env.get("PATH", os.defpath))
        except Cold as reason:
            self._give_up(str(reason))
            return
        self._memory.read(self._key())
        self._start()

    def when_settled(self, then: Callable[[], None]) -> None:
        """Call back once: now, when it is ready, when it is given up, or after a while."""
        if self.settled:
            then()
            return
        if self._state == StandbyState.LEARNING:
            self._send({"do": "pause"})
        self._waiting = then
        self._loop.call_later(START_WAIT_SECONDS, lambda: self._waited(then))

    def suit(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Have one for workers like this from now on."""
        if self._asked is not None:
            self.prepare(self._asked._replace(argv=tuple(argv), env=shared(env)))

    def unlike(self, argv: Sequence[str], env: Mapping[str, str]) -> str:
        """How this worker differs from those it was preloaded for; empty when it does not."""
        asked = self._asked
        assert asked is not None
        if list(argv) != list(asked.argv):
            return "the command changed"
        was, now = shared({**self._base_env, **asked.env}), shared(env)
        changed = sorted(name for name in {*was, *now} if was.get(name) != now.get(name))
        if changed:
            return f"the environment changed ({', '.join(changed[:4])})"
        return ""

    def fork(self, births: Sequence[Birth]) -> list[Forked | str]:
        """A worker for each, or the reason why there is none."""
        deadline = time.monotonic() + FORK_SECONDS
        heard: list[socket.socket] = []
        refusal = ""
        try:
            for birth in births:
                heard.append(self._request(birth))
        except OSError as error:
            refusal = f"the standby took no request: {error}"
        # Also when it is lost by now: those that it forked before run, and are ours.
        results: list[Forked | str] = [_born(told, deadline) for told in heard]
        results += [refusal] * (len(births) - len(heard))
        for told in heard:
            told.close()
        lost = [result for result in results if isinstance(result, str)]
        if lost:
            self._lost(lost[0])
        else:
            self._workers = len(births)
            self._learn_later(0)
        return results

    def serve(self) -> int | None:
        """Ask for a store; the descriptor on which its pid and port come, the caller's to close."""
        told, tell = os.pipe()
        try:
            self._pass({"do": "serve"}, [tell])
        except OSError:
            os.close(told)
            return None
        finally:
            os.close(tell)
        return told

    def reaped(self, pid: int, status: int) -> None:
        """A child of the launcher's that is no worker has ended."""
        if self._process is None or pid != self._process.pid:
            return
        signum = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        self._process.returncode = -signum if signum else os.WEXITSTATUS(status)
        process = self._process
        if self._sock is not None:
            self._hear()  # its last word may still be there
        if self._process is process:
            how = f"signal {signum}" if signum else f"exit code {os.WEXITSTATUS(status)}"
            tail = self._said()
            self._lost(f"the standby ended with {how}{': ' + tail if tail else ''}")

    # --- its life

    def _start(self) -> None:
        asked, wanted = self._asked, self._program
        assert asked is not None
        assert wanted is not None
        self._end()
        self._starts += 1
        self._began = time.monotonic()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read_fd, write_fd = os.pipe()
        folder, package = _own_place()
        argv = [wanted.interpreter, *wanted.options, "-c", BOOT_LINE, folder, package]
        env = shared({**self._base_env, **asked.env, **wanted.env})
        env[ROOM] = ROOM_VALUE
        try:
            self._process = spawn(
                [*argv, str(theirs.fileno())], env, write_fd, write_fd,
                (theirs.fileno(), *self._keep_fds),
            )  # fmt: skip
        except LaunchError as error:
            os.close(read_fd)
            ours.close()
            self._give_up(error.message)
            return
        finally:
            theirs.close()
            os.close(write_fd)
        self._sock = ours
        ours.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PACKET_BYTES)
        self._stream = WorkerStream(self._loop, self._output, read_fd, 2, PREFIX, None, 0)
        self._loop.watch(ours.fileno(), self._hear)
        self._state = StandbyState.LOADING
        self._reason = "the standby is still preloading"
        self._allowance.begin(self._process.pid, "preloading", self._exceeded)
        self._send(
            {
                "do": "preload",
                "module": wanted.module,
                "target": wanted.target,
                "arguments": wanted.arguments,
                "command": wanted.command,
                "modules": list(asked.modules),
                "learned": self._memory.learned,
                "excluded": sorted(self._memory.excluded),
            }
        )

    def _hear(self) -> None:
        while self._sock is not None:
            try:
                data = self._sock.recv(PACKET_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.unwatch(self._sock.fileno())
                self._sock.close()
                self._sock = None
                return  # its end is heard of with SIGCHLD
            self._said_by_it(json.loads(data))

    def _said_by_it(self, message: dict[str, Any]) -> None:
        kind = message["is"]
        if kind == "unfit":
            self._unfit(message["refused"], message["reason"])
            return
        if kind == "importing":
            self._allowance.imports(message["module"])
            return
        if kind == "learned":
            self._memory.learn(message["names"])
        self._allowance.end()
        if excess := self._allowance.too_large():
            self._give_up(excess)
            return
        first = self._state == StandbyState.LOADING
        self._state, self._reason = StandbyState.READY, ""
        self._go_on()
        if first:
            self._on_settled(True, "")
        else:
            self.on_able()

    def _unfit(self, refused: Mapping[str, str], reason: str) -> None:
        """Something in it must not be there: once more without that."""
        for name, why in refused.items():
            self._output.say(f"not preloaded: {name}: {why}")
        self._memory.exclude(refused)
        self._end()
        if refused:
            self._again(next(iter(refused.values())))
        else:
            self._give_up(f"the standby cannot be forked: {reason}")

    def _lost(self, reason: str) -> None:
        self._end()
        if time.monotonic() - self._began > SETTLED_SECONDS:
            self._starts = 0
        self._again(reason)

    def _again(self, reason: str) -> None:
        if self._starts >= MOST_STARTS:
            self._give_up(f"given up after {self._starts} standbys: {reason}")
        else:
            self._start()

    def _give_up(self, reason: str) -> None:
        self._end()
        self._state, self._reason = StandbyState.OVER, reason
        self._on_settled(False, reason)
        self._go_on()

    def _exceeded(self, reason: str, slow: bool) -> None:
        """Nobody waits for it any longer; but what is slow when a disk or an image is first read is
        tried once more, after the workers have read the same.
        """
        again = slow and not self._was_slow
        self._give_up(reason)
        if again:
            self._was_slow = True
            self._second_try = self._loop.call_later(self._second_try_seconds, self._start)

    def _end(self) -> None:
        """Kill it; the launcher reaps it."""
        self._allowance.end()
        if self._second_try is not None:
            self._second_try.cancel()
            self._second_try = None
        if self._learn_timer is not None:
            self._learn_timer.cancel()
        if self._sock is not None:
            self._loop.unwatch(self._sock.fileno())
            self._sock.close()
            self._sock = None
        if self._process is not None:
            if self._process.returncode is None:
                os.kill(self._process.pid, signal.SIGKILL)
                self._process.returncode = -signal.SIGKILL  # it is reaped with all other children
            self._process = None
        if self._stream is not None:
            self._stream.drain()
            self._stream.close()
            self._stream = None

    # --- learning

    def _learn_later(self, turn: int) -> None:
        if self._learn_timer is not None:
            self._learn_timer.cancel()
        if turn < len(LEARN_AFTER_SECONDS):
            self._learn_timer = self._loop.call_later(
                LEARN_AFTER_SECONDS[turn], lambda: self._learn(turn)
            )

    def _learn(self, turn: int) -> None:
        if self._state == StandbyState.READY:
            self._state, self._reason = StandbyState.LEARNING, "the standby is loading more"
            assert self._process is not None
            self._allowance.begin(self._process.pid, "loading more", self._exceeded)
            self._send({"do": "learn", "workers": self._workers})
        self._learn_later(turn + 1)

    # --- small things

    def _request(self, birth: Birth) -> socket.socket:
        """Ask for one worker; where its pid comes."""
        assert self._program is not None
        env = {**birth.env, **self._program.env}
        told, tell = socket.socketpair()
        message = {"do": "fork", "env": env, "command": self._program.command}
        try:
            self._pass(message, [birth.stdout_fd, birth.stderr_fd, tell.fileno()])
        except OSError:
            told.close()
            raise
        finally:
            tell.close()
        return told

    def _pass(self, message: dict[str, Any], fds: Sequence[int]) -> None:
        """Send a message with descriptors; raises OSError."""
        if self._sock is None:
            raise BrokenPipeError("it is not there")
        if not select.select([], [self._sock], [], FORK_SECONDS)[1]:
            raise BlockingIOError("it is stuck")
        passed = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))
        self._sock.sendmsg([json.dumps(message).encode()], [passed])

    def _send(self, message: dict[str, Any]) -> None:
        if self._sock is not None:
            try:
                self._sock.send(json.dumps(message).encode())
            except OSError as error:
                self._output.say(f"the standby took no {message['do']!r}: {error}")

    def _waited(self, then: Callable[[], None]) -> None:
        if self._waiting is then:
            self._go_on()

    def _go_on(self) -> None:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting()

    def _key(self) -> str:
        wanted = self._program
        assert wanted is not None
        return "\0".join((wanted.interpreter, str(wanted.module), wanted.target))

    def _said(self) -> str:
        tail = self._stream.tail.strip() if self._stream is not None else ""
        return tail.rpartition("\n")[2]


def _born(told: socket.socket, deadline: float) -> Forked | str:
    """The worker that was born at the other end; the reason where none was.

    One for which nobody waits any longer must not run beside the one that takes its place: from
    the moment when the socket is shut it cannot tell its pid, and ends. What it told before that
    is read.
    """
    left = max(0.0, deadline - time.monotonic())
    late = not select.select([told], [], [], left)[0]
    if late:
        told.shutdown(socket.SHUT_RD)
    pid, _, trouble = told.recv(4096).decode("utf-8", "replace").partition(" ")
    if trouble:
        return trouble
    if pid:
        return Forked(int(pid))
    late_text = f"the standby did not fork within {FORK_SECONDS:g} s"
    return late_text if late else "the standby could not fork"


def _own_place() -> tuple[str, str]:
    """Where this package is imported from, a folder or a zip file, and its name there."""
    package = Path(__file__).parent
    return str(package.parent), package.name
