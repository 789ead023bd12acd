"""Processes of a mixed gang: starts nodes of both sides, applies changes, and checks progress."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never

from bench import etcd_proc, processes
from bench.mixed.backends import MixedBackend
from bench.mixed.plan import Change, Kind, Mix, Side
from bench.mixed.worlds import World, checkpoint, training, worlds
from bench.settings import REPOSITORY, child_environment, etcd_binary, fresh_id

SCRIPT = REPOSITORY / "bench" / "peers" / "stepping.py"
POLL_SECONDS = 0.1
KILL_SECONDS = 60.0
END_SECONDS = 360.0
"""Timeout of the gang's end. Agents of both kinds wait up to 300 s for the others then: a node that
failed at the last moment restarts without the finished ones."""
_MARK = "MIXED_GANG"


class NotTraining(Exception):
    """Gang that did not train in the expected world; the text describes its state."""


@dataclass(slots=True)
class Node:
    name: str
    side: Side
    process: subprocess.Popen[bytes]
    log: Path
    spared: bool = False
    """Set if all nodes need it: it is neither drained nor killed."""

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-1500:]


@dataclass(slots=True)
class MixedGang:
    """Gang of the expected nodes, in order of their start. Names are never reused."""

    backend: MixedBackend
    endpoint: str
    run_id: str
    folder: Path
    logs: Path
    rolls: random.Random
    nodes: list[Node] = field(default_factory=list)
    _started: list[Node] = field(default_factory=list)

    def start(self, side: Side) -> Node:
        """Start one more node."""
        first = not self._started
        name = f"{side}-{len(self._started)}"
        log = self.logs / f"{name}.log"
        script = (str(SCRIPT), str(self.folder))
        command = self.backend.command(side, self.endpoint, self.run_id, name, first, script)
        environment = child_environment(
            **self.backend.environment(side),
            MIXED_MEMBER=name,
            MIXED_PID=str(os.getpid()),
            **{_MARK: self.run_id},
        )
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *command],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
            )
        node = Node(name, side, process, log, spared=first and self.backend.spares_first)
        self.nodes.append(node)
        self._started.append(node)
        return node

    def begin(self, mix: Mix, first: Side = Side.OURS) -> None:
        """Start all nodes of a mix, alternating between the sides."""
        left = {side: mix.of(side) for side in Side}
        turn = [first, *(side for side in Side if side is not first)]
        while any(left.values()):
            for side in turn:
                if left[side]:
                    left[side] -= 1
                    self.start(side)

    def apply(self, change: Change) -> Node:
        """Apply the change to a random node; return the node, which may be gone by then."""
        if change.kind is Kind.JOIN:
            return self.start(change.side)
        stays = change.kind is Kind.WORKER_KILLED
        node = self.rolls.choice(
            [node for node in self.nodes if node.side is change.side and (stays or not node.spared)]
        )
        match change.kind:
            case Kind.DRAIN:
                self.nodes.remove(node)
                processes.kill(node.process.pid, signal.SIGTERM)
            case Kind.NODE_KILLED:
                worker = self.worker(node)
                self.nodes.remove(node)
                processes.kill(node.process.pid)
                processes.kill(worker)
            case Kind.AGENT_KILLED:
                self.nodes.remove(node)
                processes.kill(node.process.pid)
            case Kind.WORKER_KILLED:
                processes.kill(self.worker(node))
            case _:
                assert_never(change.kind)
        return node

    def worker(self, node: Node) -> int:
        """Return the process id of a node's newest worker."""
        pids = [
            report.pid
            for world in worlds(self.folder)
            for report in world.workers
            if report.member == node.name
        ]
        return pids[-1]

    def trains(self, since: float, limit_seconds: float) -> World:
        """Wait until exactly the expected nodes train in one world formed after `since`.

        Raises NotTraining after the limit or if a node ends, and Disagreement.
        """
        before = checkpoint(self.folder)
        deadline = time.monotonic() + limit_seconds
        names = [node.name for node in self.nodes]
        while (world := training(self.folder, names, since)) is None:
            for node in self.nodes:
                if (code := node.process.poll()) is not None:
                    raise NotTraining(f"{node.name} ended with {code}:\n{node.tail()}")
            if time.monotonic() > deadline:
                seen = [sorted(w.members) for w in worlds(self.folder) if w.at > since]
                raise NotTraining(f"not within {limit_seconds:g} s; worlds since: {seen}")
            time.sleep(POLL_SECONDS)
        # A checkpoint in progress may be lost with the world, but not the one read before.
        if world.workers[0].loaded < before and world.at > since:
            raise NotTraining(f"it began with step {world.workers[0].loaded}, not {before}")
        return world

    def finish(self) -> dict[str, int]:
        """Let the training end; return each node's exit code. Raises NotTraining."""
        (self.folder / "finish").touch()
        codes = {}
        deadline = time.monotonic() + END_SECONDS
        for node in self.nodes:
            try:
                codes[node.name] = node.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise NotTraining(f"{node.name} did not exit:\n{node.tail()}") from None
        return codes

    def output(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(f"--- {node.name}\n{node.tail()}" for node in self._started)

    def stop(self) -> None:
        """Kill all descendants of these nodes, and wait for their end."""
        processes.end_marked(_MARK, self.run_id, KILL_SECONDS)
        for node in self._started:
            node.process.wait(timeout=KILL_SECONDS)


@contextlib.contextmanager
def mixed_gang(backend: MixedBackend, logs: Path, seed: int = 0) -> Iterator[MixedGang]:
    """Yield an empty gang with its own server and run id; clean up at the end."""
    with contextlib.ExitStack() as stack:
        if backend.etcd_version is None:
            endpoint = f"127.0.0.1:{etcd_proc.free_port()}"
        else:
            binary = etcd_binary(backend.etcd_version)
            server = etcd_proc.etcd_server(binary, v2=backend.etcd_v2)
            endpoint = stack.enter_context(server).endpoint
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="elasticjob-mixed-")))
        logs.mkdir(parents=True, exist_ok=True)
        gang = MixedGang(
            backend, endpoint, fresh_id("mixed"), folder, logs, random.Random(f"who {seed}")
        )
        stack.callback(gang.stop)
        yield gang
