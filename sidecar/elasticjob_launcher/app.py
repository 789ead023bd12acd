"""Launcher process: attached agent, worker deadlines, probes and the exit.

With an agent attached, the launcher only obeys it. Without one, it lets the workers continue for a
limited time, forwards SIGTERM to them, and kills them if no agent returns.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticjob_launcher.devices import ACCELERATORS
from elasticjob_launcher.loop import Loop, Timer
from elasticjob_launcher.probe import ProbeServer
from elasticjob_launcher.processes.command_process import TORCHRUN_WORKERS, own_defaults
from elasticjob_launcher.processes.node_command import NodeCommand
from elasticjob_launcher.processes.output import Output, write_termination_message
from elasticjob_launcher.processes.process_info import follow_process
from elasticjob_launcher.processes.spawn import become_subreaper, spawn
from elasticjob_launcher.processes.starter import Starter, StoreProcesses
from elasticjob_launcher.processes.stuck_processes import kill_descendants
from elasticjob_launcher.processes.workers import Workers
from elasticjob_launcher.proof import MAX_SECONDS, Message, Peer, Question
from elasticjob_launcher.settings import (
    NESTED,
    REFUSE,
    Settings,
    SettingsError,
    check_socket_path,
    torchrun_socket,
    worker_environment,
)
from elasticjob_launcher.snapshot_folder import SnapshotFolder
from elasticjob_launcher.sockets import AgentServer, Connection
from elasticjob_launcher.watchdog import SILENT_SECONDS, AgentLiveness, Deadline
from elasticjob_launcher.wire import (
    MAX_MESSAGE_BYTES,
    Attach,
    Command,
    Heartbeat,
    Prepare,
    Release,
    Signal,
    Start,
    Stop,
    WireError,
    parse_request,
)
from elasticjob_launcher.worker_count import torchrun_word
from elasticjob_launcher.zygote.manager import ZygoteManager

if TYPE_CHECKING:
    from elasticjob_launcher.processes.spawn import Spawn
    from elasticjob_launcher.wire import Request

FLUSH_SECONDS = 2.0
SWEEP_SECONDS = 5.0
EXIT_AGENT_LOST = 1


class Launcher:
    """Launcher process; `run` returns its exit code.

    `start` replaces the function that starts a worker. `init_fd` becomes readable when the init
    process dies. `workers` is the number of workers of this node, for the agent; None if it was not
    counted. `node_launch` is the reason to run the command once for this node although the agent
    does not ask for it; empty for none. `note` is a line for the log if a job has several workers.
    """

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        start: Spawn | None = None,
        init_fd: int | None = None,
        workers: int | None = None,
        node_launch: str = "",
        note: str = "",
    ) -> None:
        self._settings = settings
        self._counted = workers
        self._node_launch = node_launch
        self._note = note
        self._init_fd = init_fd
        self._loop = Loop()
        self._output = Output(lambda text: self._loop.from_thread(lambda: self._trouble(text)))
        self._snapshots = SnapshotFolder(
            None if settings.snapshot_volume == "off" else Path(settings.snapshot_volume)
        )
        self._env = {
            **worker_environment(environ, settings.library),
            **self._snapshots.environment,
        }
        if node_launch and settings.nproc not in ("", ACCELERATORS):
            self._env.setdefault(TORCHRUN_WORKERS, torchrun_word(settings.nproc))
        elif settings.check and not node_launch:
            self._env[NESTED] = self._env.get(NESTED) or REFUSE
        # A custom `start` has no command to preload for.
        self._zygote = None if start is not None else self._new_zygote()
        self._stores = self._new_stores(self._zygote)
        cold = start or partial(spawn, keep_fds=settings.keep_fds)
        starter = Starter(cold, self._zygote, self._stores)
        self._workers: Workers | NodeCommand = Workers(
            self._loop, self._output, self._env, self._send_event, starter
        )
        self._spawn = cold
        self._node: NodeCommand | None = None
        self._cwd = str(Path.cwd())
        self._attach = Attach("", "", b"", settings.orphan_seconds)
        self._agent: Connection | None = None
        self._liveness = AgentLiveness()
        self._orphan_timer: Timer | None = None
        self._deadline = Deadline(self._loop, self._deadline_passed)
        self._signalled: int | None = None
        self._ending = False
        self._exit_code: int | None = None
        self._log_trouble: str | None = None
        self._server: AgentServer | None = None
        self._probe: ProbeServer | None = None

    def _new_zygote(self) -> ZygoteManager:
        return ZygoteManager(
            self._loop,
            self._output,
            self._env,
            self._settings.keep_fds,
            self._settings.zygote,
            self._zygote_settled,
        )

    def _new_stores(self, zygote: ZygoteManager | None) -> StoreProcesses | None:
        if zygote is None:
            return None
        return StoreProcesses(self._loop, zygote, self._store_spare)

    def run(self) -> int:
        become_subreaper()
        self._loop.on_signal(signal.SIGCHLD, lambda: self._workers.reap())
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.on_signal(signum, partial(self._end_at_signal, signum))
        follow_process(self._loop, self._settings.lifeline_pid, lambda: self._end(EXIT_AGENT_LOST))
        if self._init_fd is not None:
            self._loop.watch(self._init_fd, lambda: self._end(EXIT_AGENT_LOST))
        if self._settings.probe_port is not None:
            address, port = self._settings.probe_address, self._settings.probe_port
            self._probe = ProbeServer(
                self._loop,
                address,
                port,
                lambda: (Peer(self._attach.member, self._attach.session), self._attach.job_key),
                self._probed,
                self._permitted,
                self._output.write_line,
            )
        self._listen()
        self._loop.run()
        return self._finish()

    def _listen(self) -> None:
        if self._settings.agent_fd is None:
            path = self._settings.socket_path
            self._server = AgentServer(self._loop, path, self._connected, self._output.write_line)
        else:
            sock = socket.socket(fileno=self._settings.agent_fd)
            self._connected(Connection(self._loop, sock, MAX_MESSAGE_BYTES))

    # --- agents

    def _connected(self, connection: Connection) -> None:
        connection.on_message = lambda message: self._received(connection, message)
        connection.on_closed = lambda: self._disconnected(connection)

    def _received(self, connection: Connection, message: dict[str, Any]) -> None:
        request = parse_request(message)
        if isinstance(request, Attach):
            self._attached(connection, request)
        elif connection is not self._agent:
            raise WireError("the first message must be `attach`")
        else:
            self._obey(request)

    def _attached(self, connection: Connection, attach: Attach) -> None:
        if self._attach.member not in ("", attach.member):
            raise WireError(
                f"this launcher belongs to member {self._attach.member!r}, not to "
                f"{attach.member!r}: connect to the launcher of your own node"
            )
        previous, self._agent = self._agent, connection
        if previous is not None and previous is not connection:
            previous.send({"type": "taken_over", "session": attach.session})
            previous.close_when_sent()
        if attach.orphan_seconds is None:
            attach = attach._replace(orphan_seconds=self._settings.orphan_seconds)
        self._attach = attach
        self._liveness.attached(attach.session)
        self._deadline.attached(attach.deadlines)
        if self._orphan_timer is not None:
            self._orphan_timer.cancel()
        connection.send(self._hello())
        if self._log_trouble is not None:
            connection.send({"type": "log_trouble", "message": self._log_trouble})
        if self._signalled is not None:
            connection.send({"type": "launcher_signalled", "signum": self._signalled})

    def _hello(self) -> dict[str, Any]:
        return {
            "type": "hello",
            "argv": list(self._settings.argv),
            "pid": os.getpid(),
            "python": sys.executable,
            "cwd": self._cwd,
            "probe_port": self._probe.port if self._probe is not None else 0,
            "running": self._workers.running_round,
            "pids": {str(rank): pid for rank, pid in self._workers.running_pids.items()},
            "exits": self._workers.exits,
            "env_names": sorted(self._env),
            "warms": self._node is None,
            "hears_beats": True,
            "save_signal": self._settings.save_signal,
            "live_seconds": self._deadline.live_seconds,
            "slots": self._counted,
            "node_launch": self._node_launch,
            "stuck": self._workers.stuck,
        }

    def _obey(self, request: Request) -> None:
        if isinstance(request, Heartbeat):
            self._liveness.record_heartbeat()
            self._deadline.record_heartbeat(request.at, request.live_seconds)
            self._watch_over_orphans()
        elif isinstance(request, Command):
            self._run_command(request)
        elif isinstance(request, Prepare):
            if self._zygote is not None and not self._ending:
                self._zygote.prepare(request)
            else:
                self._zygote_settled(False, "workers of this launcher are not started by command")
        elif isinstance(request, Start):
            self._start(request)
        elif isinstance(request, Stop):
            self._workers.stop(request)
        elif isinstance(request, Signal):
            caught = request.signum == self._settings.save_signal
            self._workers.signal(request.round, request.signum, caught)
        elif isinstance(request, Release):
            self._released(request)

    def _run_command(self, request: Command) -> None:
        """Run the node's command, unless it runs, and send the number of workers once known."""
        if self._node is not None:
            if self._node.joined is not None:
                self._send_joined(self._node.joined)
            return
        if self._workers.running_round is not None:
            raise WireError("the command cannot run for the node: workers run")
        self._write_note({**request.env, **own_defaults(self._env)})
        path = torchrun_socket(self._settings.socket_path)
        try:
            check_socket_path(path)
            self._workers = self._node = NodeCommand(
                self._loop,
                self._output,
                self._env,
                self._send_event,
                self._spawn,
                self._settings.argv,
                path,
                request,
                self._send_joined,
            )
        except SettingsError as error:
            raise WireError(str(error)) from error

    def _send_joined(self, workers: int) -> None:
        self._send_event({"type": "joined", "workers": workers})

    def _start(self, request: Start) -> None:
        if self._ending:
            message = "the launcher is ending"
            self._send_event({"type": "start_refused", "round": request.round, "message": message})
        elif self._liveness.may_start(request.round) or self._workers.running_round is not None:
            self._deadline.record_heartbeat(request.beat.at, request.beat.live_seconds)
            for spec in request.workers:
                self._write_note(spec["env"])
            self._workers.start(request.round, request.workers, request.max_log_bytes)
            self._deadline.watch()
        else:  # not a failure: the other nodes have started a newer round, or are about to
            self._output.write_line(
                f"not starting round {request.round}: "
                "its agent was unresponsive and other nodes may have moved on"
            )
            self._send_event({"type": "stopped", "round": request.round})

    def _write_note(self, environ: Mapping[str, str]) -> None:
        """Write the note once, unless these variables are those of the only worker of the job."""
        names = ("WORLD_SIZE",) if "WORLD_SIZE" in environ else ("PET_NNODES", TORCHRUN_WORKERS)
        if self._note and any(environ.get(name) != "1" for name in names):
            self._output.write_line(self._note)
            self._note = ""

    def _disconnected(self, connection: Connection) -> None:
        if connection is not self._agent:
            return
        self._agent = None
        self._liveness.left()
        if self._settings.agent_fd is not None:
            self._end(EXIT_AGENT_LOST)
        elif self._signalled is not None:
            self._end_by_myself(self._signalled)
        elif self._workers.running_round is not None:
            self._watch_over_orphans()

    def _watch_over_orphans(self) -> None:
        """Restart the timer that limits the workers' life without an agent."""
        if self._orphan_timer is not None:
            self._orphan_timer.cancel()
        seconds = self._attach.orphan_seconds or 0.0
        self._orphan_timer = self._loop.call_later(seconds, self._orphaned)

    def _orphaned(self) -> None:
        running = self._workers.running_round
        if running is not None and not self._liveness.present:
            reason = "no agent came back" if self._agent is None else "the agent was silent"
            self._output.write_line(
                f"{reason} for {self._attach.orphan_seconds:g} s: "
                f"killing the workers of round {running}"
            )
            self._workers.stop_unasked(running)

    def _deadline_passed(self) -> None:
        """Kill the workers after their deadline: other nodes may now start a newer round."""
        running = self._workers.running_round
        if running is not None:
            self._output.write_line(
                f"killing the workers of round {running}: "
                "no confirmation in time that it is the newest round"
            )
            self._workers.stop_unasked(running)

    def _permitted(self, number: int, live_seconds: float, answered_at: float) -> None:
        """Extend the workers' deadline on a coordinator's permission; it keeps the member's lease.

        A responsive agent with its own evidence takes precedence.
        """
        if self._liveness.present and self._deadline.has_evidence:
            return
        if number == self._workers.running_round:
            orphan_seconds = self._attach.orphan_seconds or 0.0
            self._deadline.permitted(answered_at, live_seconds, orphan_seconds)

    # --- events

    def _zygote_settled(self, ready: bool, reason: str) -> None:
        """Report the zygote to the agent, together with the store, which takes only a moment."""
        if ready and self._stores is not None and not self._stores.spare_port:
            self._stores.refill(lambda: self._send_zygote_state(True, ""))
        else:
            self._send_zygote_state(ready, reason)

    def _send_zygote_state(self, ready: bool, reason: str) -> None:
        if self._stores is not None and self._stores.spare_port:
            self._store_spare(self._stores.spare_port)
        self._send_event({"type": "standby", "ready": ready, "reason": reason})

    def _store_spare(self, port: int) -> None:
        self._send_event({"type": "store", "port": port})

    def _send_event(self, event: dict[str, Any]) -> None:
        if self._agent is not None:
            self._agent.send(event)
        if event["type"] in ("stopped", "stuck") and self._ending:
            self._end(128 + (self._signalled or signal.SIGTERM))

    def _trouble(self, message: str) -> None:
        if self._log_trouble is None:
            self._log_trouble = message
            self._output.write_line(message)
            self._send_event({"type": "log_trouble", "message": message})

    def _probed(self, question: Question) -> Message:
        """Return the facts for a prober; one that looks for another member changes nothing here."""
        running = self._workers.running_round
        present = self._liveness.present
        if not present and question.target.member == self._attach.member:
            self._liveness.reported_absent(question.round, running is not None)
            if running is not None and running < question.round:
                self._workers.stop_unasked(running)
        facts: Message = {
            "round": self._workers.running_round,
            "workers": len(self._workers.running_pids),
            "agent_attached": present,
        }
        live_seconds = self._deadline.live_seconds
        if running is not None and live_seconds is not None:
            facts["live_seconds"] = min(round(live_seconds + 0.0005, 3), MAX_SECONDS)
        return facts

    # --- the end

    def _end_at_signal(self, signum: int) -> None:
        first, self._signalled = self._signalled is None, signum
        if self._agent is not None:
            self._send_event({"type": "launcher_signalled", "signum": signum})
        if first or self._agent is None:
            self._end_unless_an_agent_does()

    def _end_unless_an_agent_does(self) -> None:
        """End the launcher if the agent is silent; check again in case it hangs before it acts."""
        if self._liveness.present:
            self._loop.call_later(SILENT_SECONDS, self._end_unless_an_agent_does)
        else:
            self._end_by_myself(self._signalled or signal.SIGTERM)

    def _end_by_myself(self, signum: int) -> None:
        running = self._workers.running_round
        if running is None:
            self._end(128 + signum)
            return
        self._ending = True
        name = signal.Signals(signum).name
        self._output.write_line(f"stopping the workers: {name} received and no agent responds")
        order = Stop(running, self._settings.stop_grace_seconds, copies=False)
        self._workers.stop(order, spares_trackers=False)

    def _released(self, request: Release) -> None:
        if request.message:
            self._output.write_line(request.message)
            write_termination_message(self._settings.termination_log, request.message)
        self._end(request.exit_code)

    def _end(self, exit_code: int) -> None:
        if self._exit_code is None:
            self._exit_code = exit_code
        self._loop.stop()

    def _finish(self) -> int:
        running = self._workers.running_round
        if running is not None:
            self._workers.stop(Stop(running, 0, copies=False), spares_trackers=False)
        kill_descendants(SWEEP_SECONDS)
        self._snapshots.close()
        self._workers.drain()
        for server in (self._server, self._node):
            if server is not None:
                server.close()
        self._output.flush(FLUSH_SECONDS)
        return self._exit_code if self._exit_code is not None else EXIT_AGENT_LOST
