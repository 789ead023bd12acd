"""The agent's end of a connection to a launcher: commands out, events in."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from elasticjob_agent.hands import (
    HandsError,
    HandsEvent,
    HandsGone,
    Hello,
    LauncherSignalled,
    LogTrouble,
    Prepared,
    PrepareWorkers,
    Started,
    StartRefused,
    StartWorkers,
    Stopped,
    StoreServed,
    WorkerExited,
)
from elasticjob_agent.launcher.wire import MAX_MESSAGE_BYTES, WireError, decode, encode

SEND_TIMEOUT_SECONDS = 10.0
HELLO_TIMEOUT_SECONDS = 10.0
BEAT_SECONDS = 0.5
SOONEST_BEAT_SECONDS = 0.05
MAX_LIVE_SECONDS = 86400.0

LiveUntil = Callable[[], float | None]
"""Until when workers may live, on the monotonic clock; None where nobody says."""


@dataclass(frozen=True, slots=True)
class Attach:
    """Who this agent is to the launcher, which answers probes with it.

    `job_key` signs those answers; `orphan_seconds` is how long workers outlive a lost agent.
    """

    member: str
    session: str
    job_key: bytes
    orphan_seconds: float = 30.0


class Channel:
    """One connection, attached. `events` ends when it closes; `HandsGone` only if it is final."""

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

    async def events(self) -> AsyncIterator[HandsEvent]:
        """What the launcher says; the connection's end, for whatever cause, ends it."""
        try:
            # The first answer comes at once or never; after it, silence is normal.
            async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
                line = await self._reader.readline()
            while line.endswith(b"\n"):
                message = decode(line)
                if message.get("hears_beats") and self._beating is None:
                    self._beat()
                yield event(message)
                line = await self._reader.readline()
        except TimeoutError:
            yield HandsGone("the launcher took the connection but did not answer")
        except (WireError, KeyError, TypeError, ValueError) as error:
            yield HandsGone(f"the launcher's message cannot be read: {error!r}")
        except OSError:
            return
        finally:
            if self._beating is not None:
                self._beating.cancel()
            self._writer.close()

    def renew(self) -> None:
        """Tell the launcher of new evidence at once: past a lease each half second counts."""
        if self._beating is not None and time.monotonic() - self._beat_at >= SOONEST_BEAT_SECONDS:
            self._beating.cancel()
            self._beat()

    def _beat(self) -> None:
        """Tell the launcher that this agent's loop turns, and until when the workers may live."""
        if self._writer.is_closing():
            return
        self._beat_at = time.monotonic()
        if self._writer.transport.get_write_buffer_size() == 0:  # it takes what it is told
            self._writer.write(encode({"type": "beat", **self._permission()}))
        self._beating = asyncio.get_running_loop().call_later(BEAT_SECONDS, self._beat)

    def _permission(self) -> dict[str, float]:
        """Return a beat's fields: how many seconds from now the workers may live."""
        live_until, now = self._live_until(), time.monotonic()
        if live_until is None:
            return {}
        seconds = min(max(0.0, live_until - now), MAX_LIVE_SECONDS)
        return {"at": now, "live_seconds": seconds}

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
            raise HandsError(f"the launcher took no {message['type']!r}: it is stuck") from error
        except (OSError, RuntimeError) as error:
            raise HandsError(f"the launcher took no {message['type']!r}: {error}") from error

    async def aclose(self) -> None:
        """After this the launcher knows that the agent is gone."""
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(SEND_TIMEOUT_SECONDS):
                await self._writer.wait_closed()


async def streams(path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to the unix socket; raises OSError or TimeoutError."""
    async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
        return await asyncio.open_unix_connection(path, limit=MAX_MESSAGE_BYTES)


def event(message: dict[str, Any]) -> HandsEvent:
    """The typed event; raises WireError, KeyError, TypeError or ValueError on a foreign message."""
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
        case "launcher_signalled":
            return LauncherSignalled(int(message["signum"]))
        case "log_trouble":
            return LogTrouble(str(message["message"]))
        case "taken_over":
            return HandsGone(f"another agent took over, session {message['session']}")
        case "error":
            return HandsGone(f"the launcher refused: {message['message']}")
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
