"""Client of a launcher: the connection, and the worker runtime of a pod over a unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from elasticjob_agent.worker_runtime import (
    Hello,
    LauncherSignalled,
    LogTrouble,
    NodeCommand,
    Prepared,
    PrepareWorkers,
    Started,
    StartRefused,
    StartWorkers,
    Stopped,
    StoreServed,
    WorkerExited,
    WorkerRuntimeError,
    WorkerRuntimeEvent,
    WorkerRuntimeLost,
    WorkersSucceeded,
)
from elasticjob_launcher.wire import MAX_MESSAGE_BYTES, WireError, decode, encode

log = logging.getLogger("elasticjob.agent")

SEND_TIMEOUT_SECONDS = 10.0
HELLO_TIMEOUT_SECONDS = 10.0
BEAT_SECONDS = 0.5
SOONEST_BEAT_SECONDS = 0.05
MAX_LIVE_SECONDS = 86400.0

LEFT_CODE = 143
"""Exit code of a launcher that was told to end."""
FIRST_REMINDER_SECONDS = 15.0
LAST_REMINDER_SECONDS = 600.0

LiveUntil = Callable[[], float | None]
"""Returns the workers' deadline on the monotonic clock; None for no deadline."""


class NodeEnding(WorkerRuntimeError):
    """The launcher was told to end before its command joined the rendezvous."""


@dataclass(frozen=True, slots=True)
class Attach:
    """Identity of this agent, which the launcher uses to answer probes.

    `job_key` signs the answers. `orphan_seconds` is the maximum time that workers outlive a lost
    agent.
    """

    member: str
    session: str
    job_key: bytes
    orphan_seconds: float = 30.0


class Channel:
    """An attached connection. `events` ends when it closes; `WorkerRuntimeLost` is final."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        live_until: LiveUntil = lambda: None,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._live_until = live_until
        self._beat_at = 0.0
        self._beating: asyncio.TimerHandle | None = None

    @staticmethod
    async def attached(
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        attach: Attach,
        live_until: LiveUntil = lambda: None,
    ) -> Channel:
        channel = Channel(reader, writer, live_until)
        await channel.send(
            {
                "type": "attach",
                "member": attach.member,
                "session": attach.session,
                "job_key": attach.job_key.hex(),
                "orphan_seconds": attach.orphan_seconds,
                "deadlines": True,
            }
        )
        return channel

    async def events(self) -> AsyncIterator[WorkerRuntimeEvent]:
        """Yield the launcher's events until the connection ends for any reason."""
        try:
            # The first message comes at once or never; afterwards silence is normal.
            async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
                line = await self._reader.readline()
            while line.endswith(b"\n"):
                message = decode(line)
                if message.get("hears_beats") and self._beating is None:
                    self._beat()
                yield parse_event(message)
                line = await self._reader.readline()
        except TimeoutError:
            yield WorkerRuntimeLost("the launcher took the connection but did not answer")
        except (WireError, KeyError, TypeError, ValueError) as error:
            yield WorkerRuntimeLost(f"the launcher's message cannot be read: {error!r}")
        except OSError:
            return
        finally:
            if self._beating is not None:
                self._beating.cancel()
            self._writer.close()

    def renew(self) -> None:
        """Send a later deadline at once instead of with the next beat.

        After a lost lease the workers live on evidence alone, and half a second matters.
        """
        if self._beating is not None and time.monotonic() - self._beat_at >= SOONEST_BEAT_SECONDS:
            self._beating.cancel()
            self._beat()

    def _beat(self) -> None:
        """Send a beat, which proves that the event loop runs and carries the workers' deadline."""
        if self._writer.is_closing():
            return
        self._beat_at = time.monotonic()
        if self._writer.transport.get_write_buffer_size() == 0:  # the launcher reads its input
            self._writer.write(encode({"type": "beat", **self._permission()}))
        self._beating = asyncio.get_running_loop().call_later(BEAT_SECONDS, self._beat)

    def _permission(self) -> dict[str, float]:
        """Return the deadline fields of a beat: the workers' remaining lifetime in seconds."""
        live_until, now = self._live_until(), time.monotonic()
        if live_until is None:
            return {}
        seconds = min(max(0.0, live_until - now), MAX_LIVE_SECONDS)
        return {"at": now, "live_seconds": seconds}

    async def run(self, command: NodeCommand) -> None:
        await self.send(
            {
                "type": "command",
                "env": dict(command.env),
                "log_dir": command.log_dir,
                "max_log_bytes": command.max_log_bytes,
            }
        )

    async def joined(self) -> int | None:
        """Wait for the number of workers of a command; 0 if it ended first, None if the connection
        closed.

        Raises:
            WorkerRuntimeError: the launcher ends or refused the command.
        """
        try:
            while (line := await self._reader.readline()).endswith(b"\n"):
                message = decode(line)
                if message.get("type") == "joined":
                    return int(message["workers"])
                if message.get("type") == "launcher_signalled":
                    await self.release(LEFT_CODE, "")
                    raise NodeEnding("its launcher was told to end")
                if message.get("type") in ("error", "taken_over"):
                    raise WorkerRuntimeError(f"the launcher refused: {message}")
        except OSError:
            return None
        except (WireError, KeyError, TypeError, ValueError) as error:
            raise WorkerRuntimeError(f"the launcher's message cannot be read: {error!r}") from error
        return None

    async def prepare(self, command: PrepareWorkers) -> None:
        await self.send(
            {
                "type": "prepare",
                "argv": list(command.argv),
                "env": dict(command.env),
                "modules": list(command.modules),
                "memory": command.memory,
            }
        )

    async def start(self, command: StartWorkers) -> None:
        workers = [
            {
                "local_rank": worker.local_rank,
                "argv": list(worker.argv),
                "env": dict(worker.env),
                "log_dir": worker.log_dir,
                "prefix": worker.prefix,
                "unlogged": list(worker.unlogged),
                "silent": list(worker.silent),
            }
            for worker in command.workers
        ]
        await self.send(
            {
                "type": "start",
                "round": command.round,
                "workers": workers,
                "max_log_bytes": command.max_log_bytes,
                **self._permission(),
            }
        )

    async def stop(self, round: int, grace_seconds: float, dump: bool) -> None:
        how = {"grace_seconds": grace_seconds, "dump": dump}
        await self.send({"type": "stop", "round": round, **how})

    async def signal(self, round: int, signum: int) -> None:
        await self.send({"type": "signal", "round": round, "signum": signum})

    async def release(self, exit_code: int, message: str) -> None:
        await self.send({"type": "release", "exit_code": exit_code, "message": message})

    async def send(self, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_SECONDS):
                self._writer.write(encode(message))
                await self._writer.drain()
        except TimeoutError as error:
            raise WorkerRuntimeError(
                f"cannot send {message['type']!r}: the launcher is stuck"
            ) from error
        except (OSError, RuntimeError) as error:
            raise WorkerRuntimeError(
                f"cannot send {message['type']!r} to the launcher: {error}"
            ) from error

    def close(self) -> None:
        """Close the connection without waiting."""
        self._writer.close()

    async def aclose(self) -> None:
        """Close the connection; the launcher then knows that the agent is gone."""
        self.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(SEND_TIMEOUT_SECONDS):
                await self._writer.wait_closed()


async def _remind() -> None:
    """Log that the command runs without having joined, in growing intervals."""
    began, seconds = time.monotonic(), FIRST_REMINDER_SECONDS
    while True:
        await asyncio.sleep(seconds)
        log.info(
            "the command has run for %d s without joining the rendezvous: "
            "this node takes part once torchrun in it asks for a round",
            time.monotonic() - began,
        )
        seconds = min(2 * seconds, LAST_REMINDER_SECONDS)


async def open_streams(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection to the unix socket. Raises OSError or TimeoutError."""
    async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
        return await asyncio.open_unix_connection(path, limit=MAX_MESSAGE_BYTES)


def parse_event(message: dict[str, Any]) -> WorkerRuntimeEvent:
    """Convert a message to an event.

    Raises:
        WireError, KeyError, TypeError, ValueError: the message is malformed or of unknown type.
    """
    match message.get("type"):
        case "hello":
            return _hello(message)
        case "started":
            return Started(
                int(message["round"]),
                _pids(message["pids"]),
                bool(message.get("warm", False)),
                str(message.get("cold_reason", "")),
            )
        case "store":
            return StoreServed(int(message["port"]))
        case "standby":
            return Prepared(bool(message["ready"]), str(message["reason"]))
        case "start_refused":
            return StartRefused(int(message["round"]), str(message["message"]))
        case "worker_exited":
            return _exited(message)
        case "stopped":
            return Stopped(int(message["round"]))
        case "succeeded":
            return WorkersSucceeded(int(message["round"]))
        case "launcher_signalled":
            return LauncherSignalled(int(message["signum"]))
        case "log_trouble":
            return LogTrouble(str(message["message"]))
        case "taken_over":
            return WorkerRuntimeLost(f"another agent took over, session {message['session']}")
        case "error":
            return WorkerRuntimeLost(f"the launcher refused: {message['message']}")
        case kind:
            raise WireError(f"unknown message type {kind!r}")


def _hello(message: dict[str, Any]) -> Hello:
    running = message["running"]
    live_seconds = message.get("live_seconds")
    return Hello(
        argv=tuple(message["argv"]),
        pid=int(message["pid"]),
        python=str(message["python"]),
        cwd=str(message["cwd"]),
        probe_port=int(message["probe_port"]),
        running=None if running is None else int(running),
        pids=_pids(message["pids"]),
        exits=tuple(_exited(exit_) for exit_ in message["exits"]),
        env_names=frozenset(message["env_names"]),
        warms=bool(message.get("warms", False)),
        save_signal=int(message.get("save_signal", 0)),
        live_until=None if live_seconds is None else time.monotonic() + float(live_seconds),
        slots=None if message.get("slots") is None else int(message["slots"]),
    )


def _exited(message: dict[str, Any]) -> WorkerExited:
    return WorkerExited(
        round=int(message["round"]),
        local_rank=int(message["local_rank"]),
        pid=int(message["pid"]),
        exit_code=message["exit_code"],
        signal=message["signal"],
        at_unix_ms=int(message["at_unix_ms"]),
        message=str(message["message"]),
        stderr_tail=str(message["stderr_tail"]),
        out_of_memory=bool(message.get("out_of_memory", False)),
        unasked=bool(message.get("unasked", False)),
    )


def _pids(pids: dict[str, int]) -> dict[int, int]:
    return {int(local_rank): int(pid) for local_rank, pid in pids.items()}


class EventStream:
    """Events of a worker runtime; reading the number of workers consumes none of them."""

    def __init__(self, events: AsyncIterator[WorkerRuntimeEvent]) -> None:
        self._events = events
        self._read: list[WorkerRuntimeEvent] = []

    async def workers(self) -> int | None:
        """Return the number in the first `Hello`; None if it has none.

        Raises:
            WorkerRuntimeError: the runtime was lost before.
        """
        reason = "it ended before its first message"
        async for event in self._events:
            self._read.append(event)
            if isinstance(event, Hello):
                return event.slots
            if isinstance(event, WorkerRuntimeLost):
                reason = event.reason
                break
        raise WorkerRuntimeError(reason)

    async def all(self) -> AsyncIterator[WorkerRuntimeEvent]:
        """Yield all events, those read before first."""
        for event in self._read:
            yield event
        async for event in self._events:
            yield event


FIRST_RETRY_SECONDS = 0.02
LAST_RETRY_SECONDS = 0.5
# Time limit for reconnecting. A living launcher accepts at once; this allows for a slow one.
RECONNECT_SECONDS = 3.0


class LauncherClient:
    """Worker runtime over the launcher of a pod.

    `events` waits for the first connection without a limit. If the socket closes while the launcher
    lives, the runtime reconnects and another `Hello` follows. A launcher that refuses connections
    is dead: `WorkerRuntimeLost` follows at once, and the loss is final.

    With `command`, the launcher runs the command once, and torchrun in it starts the workers.
    """

    def __init__(
        self, socket_path: str, attach: Attach, command: NodeCommand | None = None
    ) -> None:
        self._socket_path = socket_path
        self._attach = attach
        self._command = command
        self._channel: Channel | None = None
        self._released = False
        self._live_until: LiveUntil = lambda: None
        self._events = EventStream(self._connections())

    async def node_workers(self) -> int | None:
        if self._command is None:
            return await self._events.workers()
        channel: Channel | None = await self._first_connection()
        while channel is not None:
            reminding = asyncio.create_task(_remind())
            try:
                await channel.run(self._command)
                found = await channel.joined()
            finally:
                reminding.cancel()
                channel.close()
            if found is not None:
                return found or 1  # 0: the command ended without joining
            channel = await self._next_connection()
        raise WorkerRuntimeError(f"the launcher at {self._socket_path} is gone")

    def events(self) -> AsyncIterator[WorkerRuntimeEvent]:
        return self._events.all()

    async def _connections(self) -> AsyncIterator[WorkerRuntimeEvent]:
        channel: Channel | None = await self._first_connection()
        while channel is not None:
            async for event in channel.events():
                yield event
                if isinstance(event, WorkerRuntimeLost):
                    return
            if self._released:
                return
            channel = await self._next_connection()
        yield WorkerRuntimeLost(f"the launcher at {self._socket_path} is gone")

    def set_deadline(self, live_until: LiveUntil) -> None:
        self._live_until = live_until

    def renew(self) -> None:
        if self._channel is not None:
            self._channel.renew()

    async def prepare(self, command: PrepareWorkers) -> None:
        await self._connected().prepare(command)

    async def start(self, command: StartWorkers) -> None:
        await self._connected().start(command)

    async def stop(self, round: int, grace_seconds: float, dump: bool = False) -> None:
        await self._connected().stop(round, grace_seconds, dump)

    async def signal(self, round: int, signum: int) -> None:
        await self._connected().signal(round, signum)

    async def release(self, exit_code: int, message: str) -> None:
        self._released = True
        await self._connected().release(exit_code, message)

    async def aclose(self) -> None:
        """Disconnect from the launcher: its workers keep running, for the next agent."""
        self._released = True
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.aclose()

    def _connected(self) -> Channel:
        if self._channel is None:
            raise WorkerRuntimeError(f"not connected to the launcher at {self._socket_path}")
        return self._channel

    async def _first_connection(self) -> Channel:
        pause_seconds = FIRST_RETRY_SECONDS
        while True:
            try:
                return await self._attached()
            except (OSError, TimeoutError, WorkerRuntimeError):
                await asyncio.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, LAST_RETRY_SECONDS)

    async def _next_connection(self) -> Channel | None:
        self._channel = None
        try:
            async with asyncio.timeout(RECONNECT_SECONDS):
                while True:
                    try:
                        return await self._attached()
                    except (ConnectionRefusedError, FileNotFoundError):
                        return None
                    except (OSError, WorkerRuntimeError) as error:
                        if isinstance(error, OSError) and error.errno == errno.EACCES:
                            return None
                        await asyncio.sleep(FIRST_RETRY_SECONDS)
        except TimeoutError:
            return None

    async def _attached(self) -> Channel:
        reader, writer = await open_streams(self._socket_path)
        try:
            channel = await Channel.attached(
                reader, writer, self._attach, lambda: self._live_until()
            )
        except WorkerRuntimeError:
            writer.close()
            raise
        self._channel = channel
        return channel
