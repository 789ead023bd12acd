"""Connection to a launcher: commands of the agent, and the launcher's messages as events."""

from __future__ import annotations

import asyncio
import contextlib
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
    WorkersStuck,
    WorkersSucceeded,
)
from elasticjob_launcher.wire import WireError, decode, encode

log = logging.getLogger("elasticjob.agent")

SEND_TIMEOUT_SECONDS = 10.0
HELLO_TIMEOUT_SECONDS = 10.0
BEAT_SECONDS = 0.5
SOONEST_BEAT_SECONDS = 0.05
MAX_LIVE_SECONDS = 86400.0

LEFT_CODE = 143
"""Exit code of a launcher that was asked to end."""

LiveUntil = Callable[[], float | None]
"""Returns the workers' deadline on the monotonic clock; None for no deadline."""


class NodeEnding(WorkerRuntimeError):
    """Launcher that was stopped before its command joined the rendezvous."""


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
    """Attached connection. `events` ends when it closes; `WorkerRuntimeLost` is final."""

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
                    raise NodeEnding("its launcher was asked to end")
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


class ChannelRuntime:
    """Commands of a worker runtime over one connection at a time, which a subclass opens.

    Args:
        absence: message of the error while there is no connection.
    """

    def __init__(self, absence: str) -> None:
        self._absence = absence
        self._channel: Channel | None = None
        self._released = False
        self._live_until: LiveUntil = lambda: None

    def set_deadline(self, live_until: LiveUntil) -> None:
        self._live_until = live_until

    def renew(self) -> None:
        if self._channel is not None:
            self._channel.renew()

    async def prepare(self, command: PrepareWorkers) -> None:
        await self._connected().prepare(command)

    async def start(self, command: StartWorkers) -> None:
        await self._connected().start(command)

    async def stop(
        self,
        round: int,
        grace_seconds: float,
        dump: bool = False,
        *,
        copies: bool = True,
        ends_step: bool = False,
    ) -> None:
        await self._connected().send(
            {
                "type": "stop",
                "round": round,
                "grace_seconds": grace_seconds,
                "dump": dump,
                "copies": copies,
                "ends_step": ends_step,
            }
        )

    async def signal(self, round: int, signum: int) -> None:
        await self._connected().signal(round, signum)

    async def release(self, exit_code: int, message: str) -> None:
        self._released = True
        await self._connected().release(exit_code, message)

    async def aclose(self) -> None:
        """Disconnect from the launcher."""
        self._released = True
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.aclose()

    def _connected(self) -> Channel:
        if self._channel is None:
            raise WorkerRuntimeError(self._absence)
        return self._channel

    async def _attach(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, attach: Attach
    ) -> Channel:
        """Return the attached connection, whose workers have this runtime's deadline."""
        return await Channel.attached(reader, writer, attach, lambda: self._live_until())


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
        case "stuck":
            return WorkersStuck(int(message["round"]), str(message["message"]))
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
        node_launch=str(message.get("node_launch", "")),
        stuck=str(message.get("stuck", "")),
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
