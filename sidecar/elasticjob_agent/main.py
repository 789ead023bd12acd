"""Composition root: assembles one agent, runs it to its end and explains the end.

The termination message explains an agent's end without etcd; a kubelet keeps 4096 bytes of it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from elasticjob_agent import settings as agent_settings
from elasticjob_agent.agent import Agent
from elasticjob_agent.core.state import Ending, ExitCode, State
from elasticjob_agent.core.worker_environment import command_environment
from elasticjob_agent.polling.backends import job_handler
from elasticjob_agent.polling.node_rendezvous import NodeRendezvous
from elasticjob_agent.ports import AgentHooks, Rendezvous, StateReader
from elasticjob_agent.runtimes.launcher_channel import Attach
from elasticjob_agent.runtimes.launcher_client import LauncherClient
from elasticjob_agent.setting_values import SettingsError
from elasticjob_agent.settings import AgentSettings, Launch
from elasticjob_agent.status_server import JobReporter, serve_status
from elasticjob_agent.threads import in_thread
from elasticjob_agent.worker_files import command_log_folder
from elasticjob_agent.worker_groups import DISK_SECONDS
from elasticjob_agent.worker_runtime import NodeCommand, WorkerRuntime
from elasticjob_rendezvous.api import RendezvousHandler
from elasticjob_rendezvous.etcd.member import MemberSettings, RendezvousMember
from elasticjob_rendezvous.etcd.parameters import BACKEND
from elasticjob_rendezvous.protocol.config import Config, Identity
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.text import printable

log = logging.getLogger("elasticjob.agent")

TERMINATION_BYTES = 4096
TERMINATION_SECONDS = 5.0
"""Disk timeout for the termination message."""
_CUT = "\n[…]\n"
NONCE_BYTES = 6


def clip_message(message: str, max_bytes: int = TERMINATION_BYTES) -> str:
    """Cut the message in the middle: the first lines name the error, the last lines the cause."""
    raw = message.encode(errors="replace")
    if len(raw) <= max_bytes:
        return raw.decode()
    room = max_bytes - len(_CUT.encode())
    head = raw[: room // 3].decode(errors="ignore")
    tail = raw[len(raw) - (room - room // 3) :].decode(errors="ignore")
    return head + _CUT + tail


def write_termination_message(path: Path | None, message: str) -> OSError | None:
    """Write the message, unless `path` is None.

    Errors are returned, not raised: the agent's end continues.
    """
    if path is None:
        return None
    try:
        path.write_bytes(clip_message(printable(message)).encode())
    except OSError as error:
        return error
    return None


def run_beside_launcher() -> int:
    """Run the agent of a pod, configured by the environment, and return its exit code."""
    log_to_standard_error()
    try:
        settings = agent_settings.from_environment()
        handler = job_handler(settings)
    except SettingsError as error:
        log.error("%s", error)
        write_termination_message(agent_settings.termination_log_in_environment(), str(error))
        return ExitCode.USAGE
    session = session_nonce()
    runtime = launcher_runtime(settings, session)
    ending = asyncio.run(run_agent(settings, runtime, session, handler, to_the_end=True))
    level = logging.INFO if ending.code is ExitCode.OK else logging.ERROR
    log.log(level, "%s: %s", settings.name, ending.message)
    return ending.code


def log_to_standard_error(level: int = logging.INFO) -> None:
    """Log to standard error in lines of time, level, name and message."""
    _set_log_handler("elasticjob", "%(message)s", level)


def _prefix_rendezvous_logs(settings: AgentSettings) -> None:
    """Prefix the rendezvous library's log lines with the agent's name, which it does not know."""
    name = settings.name.replace("%", "%%")
    level = logging.getLogger("elasticjob").level
    _set_log_handler("elasticjob_rendezvous", f"{name}: %(message)s", level)


class LogFormatter(logging.Formatter):
    """Formatter whose messages are printable, with every line after the first indented.

    A text of a peer or a worker in a message can thus not look like another message.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)).replace("\n", "\n  ")


def _set_log_handler(logger: str, message: str, level: int) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(f"%(asctime)s %(levelname)s {message}"))
    target = logging.getLogger(logger)
    target.handlers = [handler]
    target.setLevel(level)
    target.propagate = False


def launcher_runtime(settings: AgentSettings, session: str) -> LauncherClient:
    """Return a client of the launcher in the training container beside this process."""
    attach = Attach(settings.member, session, settings.job_key, settings.orphan_seconds)
    per_node = settings.launch is Launch.PER_NODE
    return LauncherClient(settings.socket, attach, partial(node_command, settings), per_node)


async def node_command(settings: AgentSettings) -> NodeCommand:
    """Return the order to run the command once for this node, with a folder for its output."""
    env = command_environment(
        settings.run_id, settings.role, settings.nnodes, settings.nproc, settings.name
    )
    try:
        folder = await in_thread(partial(command_log_folder, settings.logs), DISK_SECONDS)
    except OSError as error:
        folder = None
        trouble = str(error) or "the disk does not answer"
        log.warning("%s: the output of the command is not kept: %s", settings.name, trouble)
    return NodeCommand(env, "" if folder is None else str(folder), settings.logs.stream_bytes(1))


def session_nonce() -> str:
    return secrets.token_hex(NONCE_BYTES)


def identity_of(settings: AgentSettings) -> Identity:
    """Return this node's identity in its job; its number of workers may still be unknown."""
    return Identity(
        id=settings.member,
        name=settings.name,
        address=settings.address,
        agent_port=0,
        slots=settings.slots or 1,
        role=settings.role,
        node=settings.node,
    )


def node_launch(state: State) -> str:
    """Return the launcher's reason to run the command once for this node; empty for none."""
    return "" if state.hello is None else state.hello.node_launch


def member_settings(settings: AgentSettings, session: str, state: State) -> MemberSettings:
    """Return the settings of this node in the job's v3 rendezvous.

    `state` is the agent's, after the first `Hello` of its launcher.
    """
    assert state.hello is not None
    identity = replace(
        identity_of(settings),
        slots=state.facts.slots,
        launcher_port=state.hello.probe_port,
        launch=node_launch(state),
    )
    config = Config(
        prefix=settings.prefix,
        identity=identity,
        session_nonce=session,
        bounds=settings.bounds,
        jitter=secrets.randbelow(1000) / 1000,
        orphan_seconds=settings.orphan_seconds,
        keep_alive_seconds=settings.keep_alive_seconds,
    )
    return MemberSettings(
        endpoints=settings.etcd.endpoints,
        config=config,
        job_key=settings.job_key,
        tls=settings.etcd.tls,
        user=settings.etcd.user,
        password=settings.etcd.password,
        login_files=settings.etcd.login_files,
        bind_address=settings.bind_address,
        key_in_etcd=settings.key_in_etcd,
    )


def job_reporter(
    settings: AgentSettings, session: str, handler: RendezvousHandler | None
) -> JobReporter:
    """Return the reporter of store problems and, for a job without records in etcd v3, of its
    status."""
    return JobReporter(
        identity_of(settings),
        session,
        settings.prefix,
        settings.bounds or RendezvousParams(1, 1),
        BACKEND if handler is None else handler.get_backend(),
        settings.job_key,
        getattr(handler, "setting_up", lambda: False),
    )


async def run_agent(
    settings: AgentSettings,
    runtime: WorkerRuntime,
    session: str,
    handler: RendezvousHandler | None = None,
    to_the_end: bool = False,
    hooks: AgentHooks | None = None,
) -> Ending:
    """Run an agent to its end, answer probes meanwhile, and write the termination message.

    `handler` replaces the job's rendezvous over etcd v3; it is shut down at the end.
    `to_the_end`: the process exits right after this, so signals are ignored from then on.
    `hooks` of the agent: see `AgentHooks`.
    """
    _prefix_rendezvous_logs(settings)
    reporter = job_reporter(settings, session, handler)
    polled = None if handler is None else NodeRendezvous(settings, handler, reporter.stepped)

    def enter(state: StateReader) -> Rendezvous:
        if polled is not None:
            return polled.enter(state)
        return RendezvousMember(member_settings(settings, session, state()))

    agent = Agent(settings, runtime, enter, hooks)
    reporter.trouble = lambda: agent.trouble
    reporter.workers = lambda: agent.progress.state.facts.slots
    reporter.launch = lambda: node_launch(agent.progress.state)
    # A kubelet's SIGTERM, which follows the trainer's end, must not interrupt the last writes.
    with agent.signals.handling(to_the_end):
        ending = await _run_and_serve(settings, agent, reporter)
        if polled is not None:
            await polled.release(ending)
        await explain_end(settings, ending)
    return ending


async def _run_and_serve(settings: AgentSettings, agent: Agent, reporter: JobReporter) -> Ending:
    """Run the agent and its health server."""
    address, port = settings.bind_address, settings.health_port
    try:
        async with serve_status(agent, address, port, settings.control, reporter):
            ending = await agent.run()
            await reporter.end_read()
            return ending
    except OSError as error:
        text = f"job {settings.run_id}: the agent cannot listen for probes: {error}"
        return Ending(ExitCode.USAGE, ExitCode.USAGE, text)


async def explain_end(settings: AgentSettings, ending: Ending) -> None:
    """Write the termination message of the pod."""
    write = partial(write_termination_message, settings.termination_log, ending.message)
    trouble: Exception | None
    try:
        trouble = await in_thread(write, TERMINATION_SECONDS)
    except TimeoutError:
        trouble = TimeoutError("the disk does not answer")
    except OSError as error:
        trouble = error
    if trouble is not None:
        log.warning("%s: cannot write the termination message: %s", settings.name, trouble)
