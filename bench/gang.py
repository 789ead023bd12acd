"""Gang under measurement: its agents' processes, and its workers' events."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bench import etcd_proc, processes
from bench.events import FirstAllReduce, last_step, latest, read_events, recovered_at
from bench.settings import child_environment, etcd_binary, fresh_id


class Agents(Protocol):
    """System whose agents a gang starts."""

    @property
    def name(self) -> str: ...
    @property
    def environment(self) -> Mapping[str, str]: ...
    @property
    def etcd_version(self) -> str | None: ...
    @property
    def etcd_v2(self) -> bool: ...
    @property
    def ours(self) -> bool: ...
    def command(self, endpoint: str, run_id: str, member: int) -> list[str]: ...


_MARK = "BENCH_GANG"
POLL_SECONDS = 0.02
# Required time without a change of world before the next fault.
STABLE_SECONDS = 3.0
END_SECONDS = 10.0


class NotRecovered(Exception):
    """Gang that did not form a new world in time; the text describes its state."""


@dataclass(slots=True)
class Gang:
    """Gang of agents by member number. Numbers only grow: a newcomer is a new member."""

    peer: Agents
    endpoint: str
    run_id: str
    events_folder: Path
    log_prefix: Path
    agents: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)  # expected to run
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)  # ever started

    def start_agent(self) -> int:
        """Start one more agent; return its member number."""
        member = len(self._started)
        environment = child_environment(
            **self.peer.environment,
            BENCH_MEMBER=str(member),
            BENCH_PID=str(os.getpid()),
            BENCH_EVENTS=str(self.events_folder),
            **{_MARK: self.run_id},
        )
        with Path(f"{self.log_prefix}-{member}.log").open("wb") as log:
            agent = subprocess.Popen(
                self.peer.command(self.endpoint, self.run_id, member),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
            )
        self._started.append(agent)
        self.agents[member] = agent
        return member

    def workers(self) -> list[int]:
        """Return the process id of each present member's newest worker."""
        newest = latest(self._events())
        return [newest[member].pid for member in self.agents if member in newest]

    def pause(self, workers: Collection[int], recovered: float) -> float | None:
        """Return the seconds from these workers' last step to the recovery; None if unknown."""
        steps = [last_step(self.events_folder, pid) for pid in workers]
        known = [step for step in steps if step is not None]
        return recovered - max(known) if known else None

    def worker(self, member: int) -> FirstAllReduce:
        """Return the newest event of a member's workers."""
        return latest(read_events(self.events_folder))[member]

    def drain(self, member: int) -> None:
        """Send SIGTERM to the agent, as a platform does when it reclaims a node."""
        processes.kill(self.agents.pop(member).pid, signal.SIGTERM)

    def kill_node(self, member: int) -> None:
        """Kill the agent and its worker at the same moment."""
        worker = self.worker(member).pid
        processes.kill(self.agents.pop(member).pid)
        processes.kill(worker)

    def silence_node(self, member: int) -> None:
        """Send SIGSTOP to the agent and its descendants; to others this looks like a lost network.

        They are never continued, but killed with the gang.
        """
        agent = self.agents.pop(member)
        for pid in {agent.pid, *processes.below(agent.pid)}:
            processes.kill(pid, signal.SIGSTOP)

    def recovered_at(self, since: float, limit_seconds: float) -> float:
        """Wait until exactly the present members have reduced in a world after `since`.

        Return the time. Raises NotRecovered after the limit, or if a present member's agent ends.
        """
        deadline = since + limit_seconds
        while (at := recovered_at(self._events(), since, self.agents)) is None:
            if ended := [m for m, agent in self.agents.items() if agent.poll() is not None]:
                raise NotRecovered(f"the agents of members {ended} ended")
            if time.monotonic() > deadline:
                seen = {m: e.world for m, e in latest(self._events()).items() if e.at > since}
                raise NotRecovered(f"not within {limit_seconds:g} s; worlds by member: {seen}")
            time.sleep(POLL_SECONDS)
        return at

    def wait_until_stable(self, limit_seconds: float) -> None:
        """Wait until the newest world has all present members and is STABLE_SECONDS old."""
        deadline = time.monotonic() + limit_seconds
        while True:
            events = self._events()
            newest = events[-1].at if events else 0.0
            together = recovered_at(events, 0.0, self.agents) is not None
            if together and time.monotonic() - newest > STABLE_SECONDS:
                return
            if time.monotonic() > deadline:
                raise NotRecovered("it formed a world but did not keep it")
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """Kill all descendants of this gang's agents, and wait for their end."""
        processes.end_marked(_MARK, self.run_id, END_SECONDS)
        for agent in self._started:
            agent.wait(timeout=END_SECONDS)

    def _events(self) -> list[FirstAllReduce]:
        return read_events(self.events_folder)


@contextlib.contextmanager
def gang(peer: Agents, logs: Path, turn: str) -> Iterator[Gang]:
    """Yield an empty gang with its own rendezvous server and run id; clean up at the end."""
    with contextlib.ExitStack() as stack:
        if peer.etcd_version is None:
            endpoint = f"127.0.0.1:{etcd_proc.free_port()}"
        else:
            binary = etcd_binary(peer.etcd_version)
            server = etcd_proc.etcd_server(binary, v2=peer.etcd_v2)
            endpoint = stack.enter_context(server).endpoint
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="elasticjob-bench-")))
        run_id = fresh_id("recovery")
        started = Gang(peer, endpoint, run_id, folder, logs / f"recovery-{peer.name}-{turn}")
        stack.callback(started.stop)
        yield started
