"""Command `elasticjob agent`: a standalone worker agent with torchrun's options."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated
from uuid import uuid4

import typer

from elasticjob_agent.core.state import LEFT_CODE, Ending, ExitCode
from elasticjob_agent.main import explain_end, log_to_standard_error, run_agent, session_nonce
from elasticjob_agent.polling.backends import job_handler
from elasticjob_agent.runtimes.local import LocalRuntime
from elasticjob_agent.setting_values import SettingsError
from elasticjob_agent.settings import AgentSettings
from elasticjob_agent.standalone import (
    Options,
    PreflightError,
    StandaloneAgent,
    preflight_check,
    standalone_agent,
)
from elasticjob_agent.tempdirs import TempDir
from elasticjob_cli import errors
from elasticjob_cli.errors import BadInput
from elasticjob_cli.local.etcd import free_ports
from elasticjob_cli.output import final_summary, show_text
from elasticjob_rendezvous.protocol.text import echoed

log = logging.getLogger("elasticjob.agent")

CONTEXT = {"allow_interspersed_args": False}
"""Click settings: every argument after the script belongs to the script."""


def agent(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="SCRIPT [ARG]...", help="The training script and its arguments."),
    ] = None,
    standalone: Annotated[
        bool,
        typer.Option(
            "--standalone",
            help="Run a job of this one node, with a c10d store and an ID of its own.",
        ),
    ] = False,
    nnodes: Annotated[
        str, typer.Option("--nnodes", metavar="MIN:MAX", help="Number of nodes of the job.")
    ] = "1:1",
    nproc_per_node: Annotated[
        str,
        typer.Option(
            "--nproc-per-node", "--nproc_per_node", metavar="N|auto|gpu|cpu",
            help="Workers on this node; auto: one per accelerator, or per CPU without any.",
        ),
    ] = "1",
    rdzv_backend: Annotated[
        str,
        typer.Option(
            "--rdzv-backend", "--rdzv_backend", metavar="etcd|etcd-v2|c10d",
            help="etcd (its v3 API), etcd-v2 (the v2 API; torchrun calls it etcd), or c10d.",
        ),
    ] = "etcd",
    rdzv_endpoint: Annotated[
        str,
        typer.Option(
            "--rdzv-endpoint", "--rdzv_endpoint", metavar="HOST:PORT[,HOST:PORT]",
            help="Addresses of etcd; for c10d the store's host, by default localhost:29400.",
        ),
    ] = "",
    rdzv_id: Annotated[
        str,
        typer.Option("--rdzv-id", "--rdzv_id", help="ID of the run; must be unique per run."),
    ] = "",
    rdzv_conf: Annotated[
        str,
        typer.Option(
            "--rdzv-conf", "--rdzv_conf", metavar="KEY=VALUE,...",
            help="timeout, last_call_timeout, keep_alive_seconds, confirm, settle, stop_grace, "
            "leave_grace, scale_up_wait, hang_timeout, connect_timeout (seconds); increment, "
            "incarnation; protocol, cacert, cert, key, server_name, user, password, "
            "password_file; is_host (of the c10d store). docs/backends.md lists them by backend.",
        ),
    ] = "",
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts", "--max_restarts",
            help="Failures of the whole job before it fails; lost and leaving nodes do not count.",
        ),
    ] = 3,
    local_addr: Annotated[
        str,
        typer.Option(
            "--local-addr", "--local_addr",
            help="Address by which peers reach this machine; default: its source address to etcd.",
        ),
    ] = "",
    role: Annotated[str, typer.Option("--role", help="The workers' role.")] = "default",
    log_dir: Annotated[
        str,
        typer.Option("--log-dir", "--log_dir", help="Folder in which to keep the workers' logs."),
    ] = "",
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
        typer.Option("--no-python", "--no_python", help="SCRIPT is an executable program."),
    ] = False,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")
    ] = False,
) -> None:  # fmt: skip
    """Run this node's workers of an elastic job, as torchrun does, until the job ends.

    `elasticjob agent --standalone train.py` is the job of one node, as `torchrun --standalone`;
    its store needs torch. `elasticjob run train.py` needs no torch, and can add nodes.

    Exit codes: 0 the job succeeded, or this node left on SIGTERM; 1 the job failed; 2 bad options;
    3 no rendezvous: etcd is unreachable, or the run is closed, refused or timed out; 4 the job was
    stopped from outside; 70 internal error of the agent; 130 a signal ended the job of
    --standalone.
    """
    log_to_standard_error()
    if standalone:
        given = {"--rdzv-endpoint": rdzv_endpoint, "--rdzv-id": rdzv_id}
        for option, value in given.items():
            if value:
                raise BadInput(f"{option} must not be given with --standalone, which chooses it")
        if nnodes not in ("1", "1:1"):
            raise BadInput(f"--standalone runs one node, not --nnodes {echoed(nnodes)}")
        if rdzv_backend not in ("etcd", "c10d"):  # etcd is the default
            raise BadInput(f"--standalone has a c10d store, not {echoed(rdzv_backend)}")
        rdzv_backend, rdzv_id = "c10d", uuid4().hex
        rdzv_endpoint = f"localhost:{free_ports(1)[0]}"
    options = Options(
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        rdzv_backend=rdzv_backend,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_id=rdzv_id,
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
    )
    try:
        plain = standalone_agent(options)
    except SettingsError as error:
        raise BadInput(str(error)) from error
    ending = asyncio.run(_run(plain))
    code = int(ending.code)
    if standalone and ending.launcher_code == LEFT_CODE and ending.code is ExitCode.OK:
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
        return await run_agent(settings, runtime, session_nonce(), handler, to_the_end=True)
