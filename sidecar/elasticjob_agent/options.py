"""Conversion of `elasticjob agent` options, named as torchrun's, to settings and a command."""

from __future__ import annotations

import os
import re
import secrets
import socket
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from elasticjob_agent.rdzv_conf import Conf, read_conf
from elasticjob_agent.script import worker_command
from elasticjob_agent.settings import (
    AgentSettings,
    Backend,
    EtcdAccess,
    LogSettings,
    SettingsError,
    endpoints_of,
    told_termination_log,
    visible_devices,
    warm_start_of,
)
from elasticjob_rendezvous.core.bounds import Bounds
from elasticjob_rendezvous.core.keys import job_prefix
from elasticjob_rendezvous.core.typed import echoed
from elasticjob_rendezvous.dynamic.endpoint import DEFAULT_C10D_PORT
from elasticjob_rendezvous.dynamic.endpoint import parse_endpoint as parse_store_endpoint
from elasticjob_rendezvous.etcd.endpoints import DEFAULT_PORT, Tls, parse_endpoint
from elasticjob_rendezvous.etcd.errors import InvalidConfiguration
from elasticjob_rendezvous.etcd.reach import address_of, address_towards
from elasticjob_rendezvous.peers.wire import run_key

NAMESPACE = "default"
CONNECT_SECONDS = 30.0
"""Default time to wait for etcd v3 at the start."""
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_RUN_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._ -]{0,251}[A-Za-z0-9])?")
_GPU = re.compile(r"nvidia\d+")


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


@dataclass(frozen=True, slots=True)
class PlainAgent:
    """Settings and command of an agent whose workers are its own children."""

    settings: AgentSettings
    command: tuple[str, ...]
    connect_seconds: float

    @property
    def hung_agent_seconds(self) -> float:
        """Maximum time that workers outlive a hang of this agent, in seconds.

        With etcd v3 they also have a deadline, which the agent's evidence of its lease extends.
        """
        settings = self.settings
        if settings.backend is not Backend.ETCD or settings.bounds is None:
            return settings.orphan_seconds
        return max(settings.orphan_seconds, settings.bounds.keep_alive_seconds)


def plain_agent(options: Options) -> PlainAgent:
    """Validate the options and convert them to settings. Raises `SettingsError`."""
    command = worker_command(options.command, options.module, options.no_python)
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
    settings = AgentSettings(
        prefix=prefix,
        run_id=run_id,
        member=secrets.token_hex(8),
        name=name,
        address=address,
        etcd=etcd,
        job_key=run_key(prefix, etcd.user, etcd.password),
        slots=slots_of(options.nproc_per_node),
        node=socket.gethostname(),
        role=options.role,
        bounds=Bounds(
            min_nodes=least,
            max_nodes=most,
            increment=conf.increment,
            max_restarts=options.max_restarts,
            join_timeout_seconds=conf.timeout,
            last_call_seconds=conf.last_call_timeout,
            keep_alive_seconds=conf.lost_seconds,
            confirm_seconds=conf.confirm,
            settle_seconds=conf.settle,
            stop_grace_seconds=conf.stop_grace,
            scale_up_wait_seconds=conf.scale_up_wait,
            leave_seconds=conf.leave_grace,
        ),
        # Agents of one run may share the folder, so each gets a subfolder.
        logs=LogSettings(_log_folder(options.log_dir, f"{run_id}_{name}")),
        stop_grace_seconds=conf.stop_grace,
        hang_seconds=conf.hang_timeout,
        bind_address=address if loopback else everywhere,
        termination_log=told_termination_log(),
        announce=False,  # the CLI command prints the outcome once
        backend=backend,
        rendezvous_id=run_id,
        hosts_store=_hosts(conf),
        warm_start=warm_start_of(options.warm_start, options.warm_start_modules, "--warm-start"),
        tuning=conf.tuning,
    )
    patience = CONNECT_SECONDS if conf.connect_timeout is None else conf.connect_timeout
    return PlainAgent(settings, command, patience)


def _backend(text: str) -> Backend:
    """Return the backend. `elasticjob`, the name of torchrun's plug-in, means the v3 API too."""
    try:
        return Backend.ETCD if text == "elasticjob" else Backend(text)
    except ValueError as error:
        known = "etcd (the v3 API), etcd-v2 (the v2 API, which torchrun calls etcd) or c10d"
        raise SettingsError(f"--rdzv-backend must be {known}, got {echoed(text)}") from error


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


def slots_of(text: str) -> int:
    """Return the number of workers per node.

    `auto` is the number of GPUs visible to workers, or 1 without any; `gpu`, `cpu` and a number
    are accepted as well.
    """
    gpus = _gpus()
    match text:
        case "auto":
            return gpus or 1
        case "gpu" if gpus:
            return gpus
        case "gpu":
            raise SettingsError("--nproc-per-node=gpu: there is no NVIDIA GPU on this machine")
        case "cpu":
            return len(os.sched_getaffinity(0))
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 1024:
        raise SettingsError(
            "--nproc-per-node must be auto, gpu, cpu or a number from 1 to 1024, "
            f"got {echoed(text)}"
        )
    return int(text)


def _gpus() -> int:
    devices = sum(bool(_GPU.fullmatch(entry.name)) for entry in Path("/dev").iterdir())
    visible = visible_devices()
    if visible is None:
        return devices
    return min(devices, len([part for part in visible.split(",") if part.strip()]))


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
        told = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        told = "is not UTF-8 text"
    raise SettingsError(f"--rdzv-conf password_file {echoed(path)} {told}")


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


def _log_folder(log_dir: str, name: str) -> Path | None:
    if not log_dir:
        return None
    folder = Path(log_dir).absolute()
    if folder.exists() and not folder.is_dir():
        raise SettingsError(f"--log-dir {echoed(log_dir)} is not a folder")
    return folder / name
