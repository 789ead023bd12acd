"""Command `elasticjob agent`: a standalone worker agent with torchrun's options."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any
from uuid import uuid4

import typer

from elasticjob_agent.core.state import LEFT_CODE, Ending, ExitCode
from elasticjob_agent.main import explain_end, log_to_standard_error, run_agent, session_nonce
from elasticjob_agent.polling.backends import job_handler
from elasticjob_agent.preflight import PreflightError, preflight_check
from elasticjob_agent.runtimes.local import LocalRuntime
from elasticjob_agent.setting_values import SettingsError
from elasticjob_agent.settings import AgentSettings
from elasticjob_agent.settings import signals_to_handle as handled_signals
from elasticjob_agent.standalone import (
    Options,
    StandaloneAgent,
    standalone_agent,
)
from elasticjob_agent.tempdirs import TempDir
from elasticjob_cli import errors
from elasticjob_cli.errors import BadInput
from elasticjob_cli.local.etcd import free_ports
from elasticjob_cli.output import final_summary, show_text
from elasticjob_cli.usage_errors import Command
from elasticjob_launcher.command_line.launchers import unabbreviated
from elasticjob_rendezvous.protocol.text import echoed

log = logging.getLogger("elasticjob.agent")

_UNUSED = {
    "run_path": "a script runs as its own program in any case",
    "monitor_interval": "the ends of workers are reported at once",
    "start_method": "workers are programs; --warm-start selects if they are forked",
    "event_log_handler": "the log has the events",
    "logs_specs": "--log-dir, --redirects and --tee select the logs",
    "numa_binding": "give --no-python and numactl as the program, or bind in the script",
    "duplicate_stdout_filters": "search the files of --log-dir",
    "duplicate_stderr_filters": "search the files of --log-dir",
    "node_rank": "ranks follow the natural order of --name",
    "master_addr": "the rendezvous selects it in each round",
    "master_port": "the rendezvous selects it in each round",
}
"""Options of torchrun that have no effect, with the reason."""
_DEFAULTS = ("", False, "null", "default")
"""Values of such an option, besides those of `start_method`, that ask for nothing."""


def _torch_option(name: str, short: str = "", variable: str = "", **settings: Any) -> Any:
    """Return an option of torchrun, in both of its spellings and with its variable, `PET_NAME`.

    Args:
        name: parameter's name.
        variable: another variable of torch with the same meaning.
    """
    words = dict.fromkeys((short, f"--{name.replace('_', '-')}", f"--{name}"))
    variables = (f"PET_{name.upper()}", variable)
    return typer.Option(
        *filter(None, words), envvar=[*filter(None, variables)], show_envvar=False, **settings
    )


def _unused_option(name: str) -> Any:
    """Return an option of torchrun that is accepted without an effect."""
    return _torch_option(name, hidden=True)


def unused_options(given: Mapping[str, Any]) -> list[str]:
    """Return a warning for each given option that has no effect."""
    return [
        f"--{name.replace('_', '-')} has no effect: {reason}"
        for name, reason in _UNUSED.items()
        if given[name] not in _DEFAULTS
    ]


@dataclass(frozen=True, slots=True)
class Choice:
    """Rendezvous of the command line, and if the job has this node alone."""

    context: typer.Context
    nnodes: str
    standalone: bool
    backend: str
    endpoint: str
    run_id: str

    def resolved(self) -> Choice:
        """Return the choice with a store and an id of its own for the job of one node.

        That is the one of --standalone, and as under torchrun one node without a rendezvous, or
        with a c10d store at any port, or without an endpoint and a run id.
        """
        is_single = self.nnodes in ("1", "1:1")
        is_chosen = self._source("rdzv_backend") != "DEFAULT" or self.endpoint or self.run_id
        at_any_port = self.endpoint.endswith(":0") or not (self.endpoint or self.run_id)
        hosts_own = self.backend == "c10d" and at_any_port
        has_own = self.backend == "static" or hosts_own or not is_chosen
        if self.standalone:
            self._check_standalone()
        elif self.backend == "static" and not is_single:
            raise BadInput(
                "--rdzv-backend=static numbers nodes by hand: give c10d on every node instead, "
                "with --rdzv-endpoint MASTER_ADDR:29400 and the same --rdzv-id"
            )
        elif not (is_single and has_own):
            return self
        run_id = uuid4().hex if self.standalone else self.run_id or uuid4().hex
        return Choice(self.context, "1", True, "c10d", f"localhost:{free_ports(1)[0]}", run_id)

    def _check_standalone(self) -> None:
        """Refuse options that contradict --standalone. Variables do not, as under torchrun."""
        for name in ("rdzv_endpoint", "rdzv_id"):
            if self.context.params[name] and self._given(name):
                option = f"--{name.replace('_', '-')}"
                raise BadInput(f"{option} must not be given with --standalone, which chooses it")
        if self._given("nnodes") and self.nnodes not in ("1", "1:1"):
            raise BadInput(f"--standalone runs one node, not --nnodes {echoed(self.nnodes)}")
        if self._given("rdzv_backend") and self.backend not in ("etcd", "c10d", "static"):
            raise BadInput(f"--standalone has a c10d store, not {echoed(self.backend)}")

    def _given(self, name: str) -> bool:
        """Return True if the command line has an option."""
        return self._source(name) == "COMMANDLINE"

    def _source(self, name: str) -> str:
        """Return the name of an option's source: COMMANDLINE, ENVIRONMENT or DEFAULT."""
        source = self.context.get_parameter_source(name)
        return "" if source is None else source.name


CONTEXT = {"allow_interspersed_args": False}
"""Click settings: every argument after the script belongs to the script."""


class AgentCommand(Command):
    """Command that accepts abbreviations of torchrun's options, and drops a `--` right after the
    script, unless one precedes the script.

    torchrun's parser, argparse, does so, and scripts without positional arguments depend on it.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = self._unabbreviated(args)
        before = tuple(args)
        rest = super().parse_args(ctx, args)
        words = tuple(ctx.params["command"] or ())
        if words[1:2] == ("--",) and before[-len(words) - 1 : -len(words)] != ("--",):
            ctx.params["command"] = (words[0], *words[2:])
        return rest

    def _unabbreviated(self, args: list[str]) -> list[str]:
        """Return the words with the full names of torchrun's options before the script."""
        takes_value: dict[str, bool] = {}
        of_torchrun = {"--help"}
        for option in (one for one in self.params if one.param_type_name == "option"):
            takes_value.update(dict.fromkeys(option.opts, not getattr(option, "is_flag", False)))
            if any(name.startswith("PET_") for name in option.envvar or ()):
                of_torchrun.update(name for name in option.opts if name.startswith("--"))
        found, at = list(args), 0
        while at < len(found) and found[at].startswith("-") and found[at] not in ("-", "--"):
            if found[at].partition("=")[0] not in takes_value:
                found[at] = unabbreviated(found[at], of_torchrun)
            name, equals, _ = found[at].partition("=")
            at += 2 if takes_value.get(name) and not equals else 1
        return found


COMMAND_CLASS = AgentCommand


def agent(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARG]...", help="The training script and its arguments."),
    ] = None,
    standalone: Annotated[
        bool,
        _torch_option(
            "standalone",
            help="Run a job of this one node, with a c10d store and an ID of its own.",
        ),
    ] = False,
    nnodes: Annotated[
        str,
        _torch_option(
            "nnodes", metavar="MIN:MAX",
            help="Number of nodes of the job.",
        ),
    ] = "1:1",
    nproc_per_node: Annotated[
        str,
        _torch_option(
            "nproc_per_node", metavar="N|auto|gpu|cpu",
            help="Workers on this node; auto: one per accelerator, or per CPU without any.",
        ),
    ] = "1",
    rdzv_backend: Annotated[
        str,
        _torch_option(
            "rdzv_backend", metavar="etcd|etcd-v2|c10d",
            help="etcd (its v3 API), etcd-v2 (the v2 API; torchrun calls it etcd), or c10d.",
        ),
    ] = "etcd",
    rdzv_endpoint: Annotated[
        str,
        _torch_option(
            "rdzv_endpoint", metavar="HOST:PORT[,HOST:PORT]",
            help="Addresses of etcd; for c10d the store's host, by default localhost:29400.",
        ),
    ] = "",
    rdzv_id: Annotated[
        str,
        _torch_option(
            "rdzv_id",
            help="ID of the run; must be unique per run.",
        ),
    ] = "",
    rdzv_conf: Annotated[
        str,
        _torch_option(
            "rdzv_conf", metavar="KEY=VALUE,...",
            help="timeout, last_call_timeout, keep_alive_seconds, confirm, settle, stop_grace, "
            "leave_grace, scale_up_wait, hang_timeout, connect_timeout (seconds); increment, "
            "incarnation; protocol, cacert, cert, key, server_name, user, password, "
            "password_file; is_host (of the c10d store). docs/backends.md lists them by backend.",
        ),
    ] = "",
    max_restarts: Annotated[
        int,
        _torch_option(
            "max_restarts",
            help="Failures of the whole job before it fails; lost and leaving nodes do not count.",
        ),
    ] = 3,
    local_addr: Annotated[
        str,
        _torch_option(
            "local_addr",
            help="Address by which peers reach this machine; default: its source address to etcd.",
        ),
    ] = "",
    role: Annotated[
        str,
        _torch_option("role", help="The workers' role."),
    ] = "default",
    log_dir: Annotated[
        str,
        _torch_option(
            "log_dir",
            help="Folder in which to keep the workers' logs.",
        ),
    ] = "",
    redirects: Annotated[
        str,
        _torch_option(
            "redirects", short="-r", metavar="STREAMS",
            help="Streams that go to files only: 1 is output, 2 errors, 3 both; 0:3,1:2 by local "
            "rank. Without --log-dir the files are in a new temporary folder.",
        ),
    ] = "",
    tee: Annotated[
        str,
        _torch_option(
            "tee", short="-t", metavar="STREAMS",
            help="Streams that go to files and to this terminal, as for --redirects.",
        ),
    ] = "",
    local_ranks_filter: Annotated[
        str,
        _torch_option(
            "local_ranks_filter", metavar="RANK[,RANK]",
            help="Local ranks whose output is shown here; the files have all.",
        ),
    ] = "",
    shutdown_timeout: Annotated[
        int | None,
        _torch_option(
            "shutdown_timeout", metavar="SECONDS",
            variable="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
            help="Seconds between SIGTERM and SIGKILL of a worker; default: stop_grace of "
            "--rdzv-conf, 10.",
        ),
    ] = None,
    signals_to_handle: Annotated[
        str,
        _torch_option(
            "signals_to_handle", metavar="SIGNAL[,SIGNAL]",
            help="Signals on which this node leaves; default: SIGTERM,SIGINT,SIGHUP,SIGQUIT.",
        ),
    ] = "",
    virtual_local_rank: Annotated[
        bool,
        _torch_option(
            "virtual_local_rank",
            help="Every worker sees a single GPU as device 0, and has LOCAL_RANK 0.",
        ),
    ] = False,
    name: Annotated[
        str,
        typer.Option("--name", help="Name of this node; ranks follow the natural order of names."),
    ] = "",
    warm_start: Annotated[
        str,
        typer.Option(
            "--warm-start", metavar="auto|never",
            help="Fork workers from an interpreter that has already imported their modules.",
        ),
    ] = "auto",
    warm_start_modules: Annotated[
        str,
        typer.Option(
            "--warm-start-modules", metavar="MODULE[,MODULE]",
            help="Additional modules to import there, besides the detected ones.",
        ),
    ] = "",
    no_python: Annotated[
        bool,
        _torch_option(
            "no_python",
            help="SCRIPT is an executable program.",
        ),
    ] = False,
    module: Annotated[
        bool,
        _torch_option(
            "module", short="-m",
            help="SCRIPT is a module, as in python -m.",
        ),
    ] = False,
    run_path: Annotated[bool, _unused_option("run_path")] = False,
    monitor_interval: Annotated[str, _unused_option("monitor_interval")] = "",
    start_method: Annotated[str, _unused_option("start_method")] = "",
    event_log_handler: Annotated[str, _unused_option("event_log_handler")] = "",
    logs_specs: Annotated[str, _unused_option("logs_specs")] = "",
    numa_binding: Annotated[str, _unused_option("numa_binding")] = "",
    duplicate_stdout_filters: Annotated[str, _unused_option("duplicate_stdout_filters")] = "",
    duplicate_stderr_filters: Annotated[str, _unused_option("duplicate_stderr_filters")] = "",
    node_rank: Annotated[str, _unused_option("node_rank")] = "",
    master_addr: Annotated[str, _unused_option("master_addr")] = "",
    master_port: Annotated[str, _unused_option("master_port")] = "",
) -> None:  # fmt: skip
    """Run this node's workers of an elastic job, as torchrun does, until the job ends.

    `elasticjob agent --standalone train.py` is the job of one node, as `torchrun --standalone`;
    its store needs torch, and it is the default without --rdzv-endpoint and --rdzv-id.
    `elasticjob run train.py` needs no torch, and can add nodes.

    torchrun's options have their variables too, such as PET_NNODES. Those that are not listed here
    are accepted and have no effect; a warning states the reason.

    Exit codes: 0 the job succeeded, or this node left on SIGTERM; 1 the job failed; 2 bad options;
    3 no rendezvous: etcd is unreachable, or the run is closed, refused or timed out; 4 the job was
    stopped from outside; 70 internal error of the agent; 130 a signal ended the job of
    --standalone.
    """
    log_to_standard_error()
    chosen = Choice(context, nnodes, standalone, rdzv_backend, rdzv_endpoint, rdzv_id).resolved()
    for text in unused_options(context.params):
        log.warning("%s", text)
    # As torchrun does: the workers have the variable too.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = signals_to_handle or handled_signals()
    options = Options(
        nnodes=chosen.nnodes,
        nproc_per_node=nproc_per_node,
        rdzv_backend=chosen.backend,
        rdzv_endpoint=chosen.endpoint,
        rdzv_id=chosen.run_id,
        rdzv_conf=rdzv_conf,
        max_restarts=max_restarts,
        local_addr=local_addr,
        role=role,
        log_dir=log_dir,
        name=name,
        no_python=no_python,
        module=module,
        command=tuple(command or ()),
        warm_start=warm_start,
        warm_start_modules=warm_start_modules,
        redirects=redirects,
        tee=tee,
        local_ranks_filter=local_ranks_filter,
        virtual_local_rank=virtual_local_rank,
        shutdown_timeout=shutdown_timeout,
    )
    try:
        plain = standalone_agent(options)
    except SettingsError as error:
        raise BadInput(str(error)) from error
    ending = asyncio.run(_run(plain))
    code = int(ending.code)
    if chosen.standalone and ending.launcher_code == LEFT_CODE and ending.code is ExitCode.OK:
        code = int(errors.ExitCode.INTERRUPTED)  # the job ends unfinished with its only node
    with final_summary():
        show_text(ending.message, err=code != ExitCode.OK)
    raise typer.Exit(code)


@contextlib.contextmanager
def _error_files(settings: AgentSettings) -> Iterator[AgentSettings]:
    """Yield settings with a folder for the workers' error files, even if no output is kept."""
    if settings.logs.folder is not None:
        yield settings
        return
    try:
        scratch = TempDir("errors")
    except OSError as error:
        log.warning("cannot create a folder for the workers' error files: %s", error)
        yield settings
        return
    try:
        yield replace(settings, logs=replace(settings.logs, folder=scratch.path, output=False))
    finally:
        scratch.close()


async def _run(plain: StandaloneAgent) -> Ending:
    settings = plain.settings
    try:
        handler = job_handler(settings)
        if handler is None:
            settings = await preflight_check(settings, plain.connect_seconds)
    except (PreflightError, SettingsError) as error:
        code = ExitCode.RENDEZVOUS if isinstance(error, PreflightError) else ExitCode.USAGE
        ending = Ending(code, code, f"elasticjob: {error}")
        await explain_end(settings, ending)
        return ending
    runtime = LocalRuntime(plain.command, hung_agent_seconds=plain.hung_agent_seconds)
    with _error_files(settings) as settings:
        session = session_nonce()
        return await run_agent(
            settings, runtime, session, handler, to_the_end=True, hooks=plain.hooks
        )
