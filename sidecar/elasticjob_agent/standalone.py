"""Agent started by hand: options of `elasticjob agent`, named as torchrun's.

The options give settings, the workers' command, and hooks that change the order to start them.
"""

from __future__ import annotations

import importlib.machinery
import logging
import os
import re
import secrets
import shutil
import socket
import sys
import tempfile
from dataclasses import dataclass, replace
from ipaddress import ip_address
from pathlib import Path

from elasticjob_agent.ports import AgentHooks
from elasticjob_agent.rdzv_conf import Conf, read_conf
from elasticjob_agent.runtimes.function_entrypoint import with_local_rank
from elasticjob_agent.runtimes.local import check_inherited
from elasticjob_agent.setting_values import SettingsError, endpoints_of
from elasticjob_agent.settings import (
    AgentSettings,
    Backend,
    EtcdAccess,
    LogSettings,
    inherited_environment,
    log_line_prefix_template,
    max_log_bytes,
    python_of_workers,
    termination_log_in_environment,
    warm_start_of,
)
from elasticjob_agent.worker_output import Std, WorkerOutput, single_device
from elasticjob_agent.worker_runtime import StartWorkers, WorkerStart
from elasticjob_launcher.devices import CountError
from elasticjob_launcher.settings import SettingsError as LauncherSettingsError
from elasticjob_launcher.worker_count import count_workers
from elasticjob_rendezvous.dynamic.endpoint import DEFAULT_C10D_PORT
from elasticjob_rendezvous.dynamic.endpoint import parse_endpoint as parse_store_endpoint
from elasticjob_rendezvous.etcd.endpoints import DEFAULT_PORT, Tls, parse_endpoint
from elasticjob_rendezvous.etcd.errors import InvalidConfiguration
from elasticjob_rendezvous.etcd.reachability import UNIX, address_of, address_towards
from elasticjob_rendezvous.etcd.shared_key import KEY_BYTES
from elasticjob_rendezvous.links.wire import run_key
from elasticjob_rendezvous.protocol.records.keys import job_prefix
from elasticjob_rendezvous.protocol.records.params import RendezvousParams
from elasticjob_rendezvous.protocol.text import bounded, echoed

log = logging.getLogger("elasticjob.agent")

NAMESPACE = "default"
MAX_SECONDS = 86400
LOOPBACK = "127.0.0.1"
CONNECT_SECONDS = 30.0
"""Default time to wait for etcd v3 at the start."""
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_RUN_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._ -]{0,251}[A-Za-z0-9])?")


def worker_command(words: tuple[str, ...], module: bool, no_python: bool) -> tuple[str, ...]:
    """Return the command of each worker. Raises `SettingsError` if it cannot be run."""
    here = _current_folder()
    if not words or not words[0]:
        raise SettingsError(
            "no command: give a script, -m and a module, or --no-python and a program"
        )
    if module and no_python:
        raise SettingsError("-m and --no-python must not be given together")
    program, *arguments = words
    if no_python:
        if shutil.which(program) is None:
            raise SettingsError(f"{echoed(program)} is not a program that can be run")
        return (program, *arguments)
    python = python_of_workers()
    if shutil.which(python) is None:
        raise SettingsError(f"PYTHON_EXEC must be an interpreter that can be run: {echoed(python)}")
    if module:
        top = program.partition(".")[0]
        known = python != sys.executable or importlib.machinery.PathFinder.find_spec(
            top, [str(here), *sys.path]
        )
        if not known:
            raise SettingsError(
                f"-m {bounded(program)}: there is no module {echoed(top)} here or installed"
            )
        return (python, "-u", "-m", program, *arguments)
    path = Path(program)
    if not path.exists():
        raise SettingsError(f"the script {echoed(program)} does not exist (looked in {here})")
    if path.is_dir() and not (path / "__main__.py").exists():
        raise SettingsError(f"{echoed(program)} is a folder without a __main__.py, not a script")
    return (python, "-u", program, *arguments)


def _check_launcher_variables() -> None:
    """Raise `SettingsError` for a variable that the launcher would refuse after the start."""
    try:
        check_inherited(inherited_environment())
    except LauncherSettingsError as error:
        raise SettingsError(str(error)) from error


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except OSError as error:  # programs fail in confusing ways in a removed folder
        raise SettingsError("the current folder was removed: change to another one") from error


@dataclass(frozen=True, slots=True)
class Options:
    """Command-line options, not validated."""

    nnodes: str
    nproc_per_node: str
    rdzv_backend: str
    rdzv_endpoint: str
    rdzv_id: str
    rdzv_conf: str
    max_restarts: int
    local_addr: str
    role: str
    log_dir: str
    name: str
    no_python: bool
    module: bool
    command: tuple[str, ...]
    warm_start: str = "auto"
    warm_start_modules: str = ""
    redirects: str = ""
    tee: str = ""
    local_ranks_filter: str = ""
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerOptions(AgentHooks):
    """Hooks that apply torchrun's options for single workers to the order to start them."""

    output: WorkerOutput
    virtual_local_rank: bool = False

    def adjust_start(self, order: StartWorkers) -> StartWorkers:
        return replace(order, workers=tuple(map(self._adjust, order.workers)))

    def _adjust(self, worker: WorkerStart) -> WorkerStart:
        env = single_device(worker.local_rank) if self.virtual_local_rank else {}
        argv = with_local_rank(worker.argv, worker.local_rank)
        return self.output.adjust(replace(worker, argv=argv, env={**worker.env, **env}))


@dataclass(frozen=True, slots=True)
class StandaloneAgent:
    """Settings, command and hooks of an agent whose workers are its own children."""

    settings: AgentSettings
    command: tuple[str, ...]
    connect_seconds: float
    hooks: WorkerOptions

    @property
    def hung_agent_seconds(self) -> float:
        """Maximum time that workers outlive a hang of this agent, in seconds.

        With etcd v3 they also have a deadline, which the agent's evidence of its lease extends.
        """
        settings = self.settings
        if settings.backend is not Backend.ETCD or settings.bounds is None:
            return settings.orphan_seconds
        return max(settings.orphan_seconds, settings.bounds.keep_alive_seconds)


def standalone_agent(options: Options) -> StandaloneAgent:
    """Validate the options and convert them to settings. Raises `SettingsError`."""
    command = worker_command(options.command, options.module, options.no_python)
    _check_launcher_variables()
    least, most = _nodes(options.nnodes)
    backend = _backend(options.rdzv_backend)
    if options.max_restarts < 0:
        raise SettingsError(f"--max-restarts must be 0 or more, got {options.max_restarts}")
    conf = read_conf(options.rdzv_conf, backend)
    run_id = _run_id(options.rdzv_id)
    name = _named("--name", options.name or f"{socket.gethostname()}-{os.getpid()}")
    etcd = _etcd(options.rdzv_endpoint, conf, backend)
    address = _address(options.local_addr, etcd)
    prefix = job_prefix(NAMESPACE, run_id, conf.incarnation)
    loopback = ip_address(address).is_loopback
    everywhere = "::" if ":" in address else "0.0.0.0"
    slots = slots_of(options.nproc_per_node, command)
    hooks = _worker_options(options, slots)
    stop_grace_seconds = _stop_grace(options.shutdown_timeout, conf)
    settings = AgentSettings(
        prefix=prefix,
        run_id=run_id,
        member=secrets.token_hex(8),
        name=name,
        address=address,
        etcd=etcd,
        job_key=_job_key(prefix, etcd, backend),
        key_in_etcd=backend is Backend.ETCD and not etcd.password,
        slots=slots,
        node=socket.gethostname(),
        role=options.role,
        bounds=RendezvousParams(
            min_nodes=least,
            max_nodes=most,
            increment=conf.increment,
            max_restarts=options.max_restarts,
            join_timeout_seconds=conf.timeout,
            last_call_seconds=conf.last_call_timeout,
            keep_alive_seconds=conf.lost_seconds,
            confirm_seconds=conf.confirm,
            settle_seconds=conf.settle,
            stop_grace_seconds=stop_grace_seconds,
            scale_up_wait_seconds=conf.scale_up_wait,
            leave_seconds=conf.leave_grace,
        ),
        # Agents of one run may share the folder, so each gets a subfolder.
        logs=LogSettings(
            _log_folder(options.log_dir, f"{run_id}_{name}", hooks.output),
            max_log_bytes(inherited_environment()),
        ),
        stop_grace_seconds=stop_grace_seconds,
        hang_seconds=conf.hang_timeout,
        bind_address=address if loopback else everywhere,
        termination_log=termination_log_in_environment(),
        announce=False,  # the CLI command prints the outcome once
        backend=backend,
        rendezvous_id=run_id,
        hosts_store=_hosts(conf),
        warm_start=warm_start_of(options.warm_start, options.warm_start_modules, "--warm-start"),
        backend_options=conf.backend_options,
    )
    patience = CONNECT_SECONDS if conf.connect_timeout is None else conf.connect_timeout
    return StandaloneAgent(settings, command, patience, hooks)


def _worker_options(options: Options, slots: int) -> WorkerOptions:
    """Return the options for single workers. Raises `SettingsError`."""
    output = WorkerOutput(
        _streams("--redirects", options.redirects),
        _streams("--tee", options.tee),
        _local_ranks(options.local_ranks_filter),
        log_line_prefix_template(),
        options.role,
    )
    if options.virtual_local_rank:
        try:
            single_device(slots - 1)
        except ValueError as error:
            raise SettingsError(f"--{error}") from error
    return WorkerOptions(output, options.virtual_local_rank)


def _streams(option: str, text: str) -> Std | dict[int, Std] | None:
    try:
        return Std.from_str(text) if text else None
    except ValueError as error:
        raise SettingsError(f"{option}: {error}") from error


def _local_ranks(text: str) -> tuple[int, ...] | None:
    """Return the local ranks of `--local-ranks-filter`; None without one."""
    parts = [part.strip() for part in text.split(",")]
    if text and not all(part.isascii() and part.isdigit() for part in parts):
        raise SettingsError(
            f"--local-ranks-filter must be local ranks such as 0,1, got {echoed(text)}"
        )
    return tuple(map(int, parts)) if text else None


def _stop_grace(shutdown_timeout: int | None, conf: Conf) -> float:
    """Return the time between SIGTERM and SIGKILL; `--shutdown-timeout` precedes stop_grace."""
    if shutdown_timeout is None:
        return conf.stop_grace
    if not 0 <= shutdown_timeout <= MAX_SECONDS:
        raise SettingsError(
            f"--shutdown-timeout must be seconds from 0 to {MAX_SECONDS}, got {shutdown_timeout}"
        )
    return float(shutdown_timeout)


def _backend(text: str) -> Backend:
    """Return the backend. `elasticjob`, the name of torchrun's plug-in, means the v3 API too."""
    try:
        return Backend.ETCD if text == "elasticjob" else Backend(text)
    except ValueError as error:
        known = "etcd (the v3 API), etcd-v2 (the v2 API, which torchrun calls etcd) or c10d"
        raise SettingsError(f"--rdzv-backend must be {known}, got {echoed(text)}") from error


def _job_key(prefix: str, etcd: EtcdAccess, backend: Backend) -> bytes:
    """Return the key of this run's agents; empty if etcd keeps it.

    The agents of the other backends have no links: the key only protects this agent's launcher.
    """
    if backend is not Backend.ETCD:
        return secrets.token_bytes(KEY_BYTES)
    return run_key(prefix, etcd.user, etcd.password) if etcd.password else b""


def _hosts(conf: Conf) -> bool | None:
    """Return True if this agent hosts the c10d store; None to decide by the endpoint's address."""
    match conf.is_host.lower():
        case "":
            return None
        case "true" | "1" | "yes":
            return True
        case "false" | "0" | "no":
            return False
    raise SettingsError(f"--rdzv-conf is_host must be true or false, got {echoed(conf.is_host)}")


def slots_of(text: str, command: tuple[str, ...] = ()) -> int:
    """Return the number of workers on this node for a number or a word of torchrun's option.

    Devices are counted with the interpreter of the workers' command.
    """
    try:
        return count_workers(text, command, inherited_environment()).workers
    except CountError as error:
        raise SettingsError(f"--nproc-per-node={text}: {error}") from error


def _nodes(text: str) -> tuple[int, int]:
    least_text, colon, most_text = text.partition(":")
    parts = (least_text, most_text if colon else least_text)
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise SettingsError(f"--nnodes must be MIN:MAX or a number, got {echoed(text)}")
    least, most = int(parts[0]), int(parts[1])
    if not 1 <= least <= most:
        raise SettingsError(f"--nnodes must have 1 <= MIN <= MAX, got {echoed(text)}")
    return least, most


def _run_id(text: str) -> str:
    if not text:
        raise SettingsError("--rdzv-id must be given: all agents of one run share it")
    if not _RUN_ID.fullmatch(text):
        raise SettingsError(
            "--rdzv-id must be letters, digits, spaces, '.', '_' and '-', at most 253, beginning "
            f"and ending with a letter or digit; got {echoed(text)}"
        )
    return text


def _named(option: str, text: str) -> str:
    if not _NAME.fullmatch(text):
        raise SettingsError(
            f"{option} must be letters, digits, '.', '_' and '-', at most 253, beginning and "
            f"ending with a letter or digit; got {echoed(text)}"
        )
    return text


def _etcd(text: str, conf: Conf, backend: Backend) -> EtcdAccess:
    if backend is Backend.C10D:
        return EtcdAccess((_store_endpoint(text),))
    if not text:
        raise SettingsError("--rdzv-endpoint must name etcd, such as host:2379")
    endpoints = endpoints_of(text, "--rdzv-endpoint")
    for path in (conf.cacert, conf.cert, conf.key, conf.password_file):
        if path and not Path(path).is_file():
            raise SettingsError(f"--rdzv-conf names a file that does not exist: {echoed(path)}")
    if bool(conf.cert) != bool(conf.key):
        raise SettingsError("--rdzv-conf must give cert and key together")
    if conf.password:
        log.warning(
            "--rdzv-conf password= is visible to every user of this machine in the list of "
            "processes: put the password into a file and give password_file="
        )
    password = _password(conf.password_file) if conf.password_file else conf.password
    if bool(conf.user) != bool(password):
        raise SettingsError("--rdzv-conf must give user and password (or password_file) together")
    if conf.protocol not in ("", "http", "https"):
        raise SettingsError(
            f"--rdzv-conf protocol must be http or https, got {echoed(conf.protocol)}"
        )
    wants_tls = conf.protocol == "https" or bool(conf.cacert or conf.cert or conf.server_name)
    if wants_tls and conf.protocol == "http":
        raise SettingsError("--rdzv-conf has TLS files, so protocol must be https")
    tls = None
    if wants_tls:
        names = (conf.cacert, conf.cert, conf.key, conf.server_name)
        tls = Tls(*(name or None for name in names))
    try:
        for endpoint in endpoints:
            parse_endpoint(endpoint, tls)
    except InvalidConfiguration as error:
        raise SettingsError(f"--rdzv-endpoint {error.endpoint}: {error.detail}") from error
    return EtcdAccess(endpoints, tls, conf.user or None, password or None)


def _password(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        fault = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        fault = "is not UTF-8 text"
    raise SettingsError(f"--rdzv-conf password_file {echoed(path)} {fault}")


def _store_endpoint(text: str) -> str:
    """Return host and port of the c10d store; as with torchrun, this machine by default."""
    try:
        host, port = parse_store_endpoint(text, DEFAULT_C10D_PORT)
    except ValueError as error:
        raise SettingsError(f"--rdzv-endpoint: {error}") from error
    if not 0 < port < 65536:
        raise SettingsError(f"--rdzv-endpoint must have a port from 1 to 65535, got {echoed(text)}")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address(local_addr: str, etcd: EtcdAccess) -> str:
    """Return the address at which peers reach this machine.

    Without `--local-addr` it is the local address of a connection to etcd.
    """
    host, port = local_addr, 0
    if not host and etcd.endpoints[0].startswith(UNIX):
        return LOOPBACK  # its socket is on this machine
    if not host:
        target = etcd.endpoints[0].rpartition("://")[2]
        host, _, number = target.rpartition(":")
        host, port = host.strip("[]"), int(number or DEFAULT_PORT)
    try:
        return address_of(local_addr) if local_addr else address_towards(host, port)
    except (OSError, UnicodeError) as error:  # UnicodeError: an invalid name has no IDNA form
        if local_addr:
            raise SettingsError(
                f"--local-addr {echoed(local_addr)} is not an address: {error}"
            ) from error
        raise SettingsError(
            f"--rdzv-endpoint: {echoed(host)} cannot be reached from here ({error}); correct it, "
            "or give --local-addr if only this machine's own address cannot be found"
        ) from error


def _log_folder(log_dir: str, name: str, output: WorkerOutput) -> Path | None:
    """Return the folder of the logs; a new one, which stays, for streams that need files."""
    if not log_dir:
        if not output.needs_files:
            return None
        try:
            made = Path(tempfile.mkdtemp(prefix="elasticjob-logs-"))
        except OSError as error:
            raise SettingsError(f"--log-dir must be given: no temporary folder: {error}") from error
        log.info("the workers' logs are in %s", made)
        return made / name
    folder = Path(log_dir).absolute()
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"--log-dir {echoed(log_dir)} is not a folder")
    return folder / name
