"""Agent settings, read from environment variables.

No other module of the agent reads the environment, except `control`, which must stay light.

| variable | meaning | default |
|---|---|---|
| `ELASTICJOB_PREFIX` | key prefix, `/elasticjob/<namespace>/<uid>/<incarnation>/` | required |
| `ELASTICJOB_BACKEND` | rendezvous backend: etcd (v3), etcd-v2 or c10d | etcd |
| `ELASTICJOB_ENDPOINTS` | `host:port`, URLs or `unix:///path` of etcd, or c10d store | required |
| `ELASTICJOB_STORE_HOST` | `true`: this agent hosts the c10d store | false |
| `ELASTICJOB_BOUNDS` | `state/bounds` as JSON, for the backends other than etcd | required there |
| `ELASTICJOB_MEMBER_ID` | id of this member: a pod's uid | required |
| `ELASTICJOB_NAME` | name of this member; natural order of names gives the ranks | required |
| `ELASTICJOB_ADDRESS` | IP address at which peers reach this node's workers | required |
| `ELASTICJOB_SLOTS` | number of workers; `launcher`: the number that the launcher counts | 1 |
| `ELASTICJOB_LAUNCH` | PerWorker: start each worker; PerNode: run the command once | PerWorker |
| `ELASTICJOB_NNODES` | `min:max` nodes of the job, for torchrun in the command | 1:1 |
| `ELASTICJOB_NPROC` | workers, also auto, gpu or cpu, for torchrun in the command | SLOTS |
| `ELASTICJOB_RUN_ID` | id of the job, for workers and messages | the uid in the prefix |
| `ELASTICJOB_NODE` | machine name, for people | empty |
| `ELASTICJOB_ROLE` | torch's role | default |
| `ELASTICJOB_JOB_KEY_FILE` | file with the secret that the job's agents share | required |
| `ELASTICJOB_ETCD_CA_FILE`, `…_CERT_FILE`, `…_KEY_FILE`, `…_SERVER_NAME` | TLS to etcd | none |
| `ELASTICJOB_ETCD_USER_FILE`, `ELASTICJOB_ETCD_PASSWORD_FILE` | etcd credentials | none |
| `ELASTICJOB_SOCKET` | the launcher's socket | /elasticjob/launcher.sock |
| `ELASTICJOB_LOG_DIR` | folder of the workers' logs; empty keeps none | empty |
| `ELASTICJOB_MAX_LOG_BYTES` | maximum log size of each stream of each worker | 16 MiB |
| `ELASTICJOB_TOTAL_LOG_BYTES` | maximum size of all logs of all kept rounds | no limit |
| `ELASTICJOB_KEEP_ROUNDS` | number of rounds whose logs are kept | 20 |
| `ELASTICJOB_STOP_GRACE_SECONDS` | grace period of workers when this node leaves | 10 |
| `ELASTICJOB_HANG_TIMEOUT_SECONDS` | time without progress that counts as a hang | 0: never |
| `ELASTICJOB_KEEP_ALIVE_SECONDS` | lease TTL until the job's bounds are known | 5 |
| `ELASTICJOB_ORPHAN_SECONDS` | maximum time that workers outlive a lost agent | 30 |
| `ELASTICJOB_BIND_ADDRESS` | listen address for peers | 0.0.0.0 |
| `ELASTICJOB_CONTROL` | unix socket for `leave` and status; empty opens none | empty |
| `ELASTICJOB_HEALTH_PORT` | TCP port for probes; empty opens none | empty |
| `ELASTICJOB_WARM_START` | Auto: fork workers from a preloaded interpreter; Never | Auto |
| `ELASTICJOB_WARM_START_MODULES` | modules to preload beside the detected ones | none |
| `ELASTICJOB_TERMINATION_LOG` | file of the termination message | /dev/termination-log |
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from elasticjob_agent.control import CONTROL
from elasticjob_agent.setting_values import (
    SettingsError,
    address,
    endpoints_of,
    required,
    seconds,
    secret,
    segment,
    text_file,
    whole,
)
from elasticjob_rendezvous.etcd.endpoints import LoginFiles, Tls
from elasticjob_rendezvous.protocol.records.codec import MalformedRecord, decode
from elasticjob_rendezvous.protocol.records.params import LEAST_KEEP_ALIVE_SECONDS, RendezvousParams
from elasticjob_rendezvous.protocol.text import echoed


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Backend options; None selects the backend's default.

    Args:
        connect_seconds: maximum wait for the rendezvous store at the start; None: the join
            timeout.
        read_seconds: timeout of one read, of etcd or of a key in the c10d store.
        etcd_prefix: folder of all runs in etcd.
        beat_seconds: heartbeat interval of a c10d rendezvous.
        beats: missed heartbeats after which a node is lost.
        heartbeat_seconds: timeout of one heartbeat.
        close_seconds: timeout of leaving or closing a c10d rendezvous.
    """

    connect_seconds: float | None = None
    read_seconds: int | None = None
    etcd_prefix: str | None = None
    beat_seconds: int | None = None
    beats: int | None = None
    heartbeat_seconds: float | None = None
    close_seconds: float | None = None


NO_BACKEND_OPTIONS = BackendOptions()


TERMINATION_LOG = Path("/dev/termination-log")
MAX_LOG_BYTES = 16 * 1024 * 1024
LEAST_LOG_BYTES = 4096
COUNTED = "launcher"
"""Value of `ELASTICJOB_SLOTS` for the number that the launcher counts."""
KEEP_ROUNDS = 20
_NNODES = re.compile(r"[0-9]+:[0-9]+")
_PREFIX = re.compile(r"/elasticjob/[^/]+/(?P<uid>[^/]+)/(?P<incarnation>\d+)/")


class Backend(StrEnum):
    """Rendezvous backend."""

    ETCD = "etcd"
    ETCD_V2 = "etcd-v2"
    C10D = "c10d"


class Launch(StrEnum):
    """Start of the workers: by the launcher, or by torchrun in a command that runs once."""

    PER_WORKER = "PerWorker"
    PER_NODE = "PerNode"


@dataclass(frozen=True, slots=True)
class EtcdAccess:
    """Endpoints and credentials of etcd, or the endpoint of the c10d store.

    `login_files` hold the present user and password; None if they do not change.
    """

    endpoints: tuple[str, ...]
    tls: Tls | None = None
    user: str | None = None
    password: str | None = None
    login_files: LoginFiles | None = None


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Location and limits of the workers' logs.

    Args:
        folder: parent of `round_<n>/<local_rank>/`; None keeps nothing.
        max_bytes: maximum size of each stream of each worker.
        keep_rounds: number of rounds whose logs are kept.
        shared: make the folders writable for all, since workers may run under another uid.
        output: keep the workers' output; False keeps only their error files.
        total_bytes: maximum size of all logs together; None for no limit.
    """

    folder: Path | None = None
    max_bytes: int = MAX_LOG_BYTES
    keep_rounds: int = KEEP_ROUNDS
    shared: bool = False
    output: bool = True
    total_bytes: int | None = None

    def stream_bytes(self, workers: int) -> int:
        """Return the maximum size of each stream of each of a node's workers."""
        if self.total_bytes is None:
            return self.max_bytes
        share = self.total_bytes // (2 * workers * self.keep_rounds)
        return max(LEAST_LOG_BYTES, min(self.max_bytes, share))


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Warm start: fork workers from a preloaded interpreter.

    `modules` are preloaded beside the detected ones.
    """

    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """All settings of one agent.

    `slots` is None if the launcher counts the workers. `bounds` is None if an operator writes them.
    `announce`: the launcher prints the outcome and
    writes its own termination message. `warm_start` None starts every worker in a new interpreter.
    `rendezvous_id`, `hosts_store` and `backend_options` apply to the backends other than etcd's v3
    API, and `etcd` then holds the endpoints of their store. `hosts_store` None: this agent hosts
    the store if the endpoint is an address of this machine and no other process hosts it.
    """

    prefix: str
    run_id: str
    member: str
    name: str
    address: str
    etcd: EtcdAccess
    job_key: bytes
    slots: int | None = 1
    launch: Launch = Launch.PER_WORKER
    nnodes: str = "1:1"
    nproc: str = ""
    backend: Backend = Backend.ETCD
    rendezvous_id: str = ""
    hosts_store: bool | None = False
    node: str = ""
    role: str = "default"
    bounds: RendezvousParams | None = None
    socket: str = "/elasticjob/launcher.sock"
    logs: LogSettings = LogSettings()
    stop_grace_seconds: float = 10.0
    keep_alive_seconds: float = 5.0
    orphan_seconds: float = 30.0
    bind_address: str = "0.0.0.0"
    control: Path | None = None
    health_port: int | None = None
    key_in_etcd: bool = False
    """True if etcd keeps `job_key`, which is then empty until the preflight check."""
    termination_log: Path | None = None
    announce: bool = True
    warm_start: WarmStart | None = None
    hang_seconds: float = 0.0
    backend_options: BackendOptions = NO_BACKEND_OPTIONS


def from_environment(environ: Mapping[str, str] | None = None) -> AgentSettings:
    """Read the settings of an agent beside a launcher. Raises `SettingsError`."""
    return _read(os.environ if environ is None else environ)


def inherited_names() -> frozenset[str]:
    """Return the names of this process's environment variables, which children inherit."""
    return frozenset(os.environ)


def inherited_environment() -> dict[str, str]:
    """Return this process's environment variables, which children inherit."""
    return dict(os.environ)


def workers_are_identical() -> bool:
    """Return True if TORCH_ELASTIC_WORKER_IDENTICAL=1: all nodes have the same role and size."""
    return os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1"


def signals_to_handle() -> str:
    """Return the comma-separated names of the signals that make an agent leave."""
    return os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")


def uninterruptible_seconds() -> str:
    """Return the maximum time of a worker in uninterruptible sleep, not yet validated."""
    return os.environ.get("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "")


def max_log_bytes(environ: Mapping[str, str]) -> int:
    """Return the maximum size of each stream of each worker. Raises `SettingsError`."""
    return whole(environ, "ELASTICJOB_MAX_LOG_BYTES", MAX_LOG_BYTES, least=LEAST_LOG_BYTES)


def python_of_workers() -> str:
    """Return the interpreter of scripts and modules: torch's PYTHON_EXEC, or this one."""
    return os.environ.get("PYTHON_EXEC") or sys.executable


def log_line_prefix_template() -> str | None:
    """Return the template of the prefix of the workers' lines, of which torch has a variable."""
    return os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")


def visible_devices() -> str | None:
    """Return CUDA_VISIBLE_DEVICES, which limits the GPUs that `auto` counts."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def termination_log_in_environment() -> Path | None:
    """Return the path of the termination message, also if other settings are wrong."""
    return _termination_log(os.environ)


def _termination_log(environ: Mapping[str, str]) -> Path | None:
    """Return the configured path, else the container runtime's default if it exists.

    An empty variable disables the message.
    """
    path = environ.get("ELASTICJOB_TERMINATION_LOG")
    if path:
        return Path(path)
    return TERMINATION_LOG if path is None and TERMINATION_LOG.exists() else None


def warm_start_of(choice: str, modules: str, source: str) -> WarmStart | None:
    """Parse the choice, Auto or Never, and comma-separated modules; None for Never.

    `source` names the setting in errors.
    """
    known = {"auto": True, "never": False}
    if choice.lower() not in known:
        raise SettingsError(f"{source} must be Auto or Never, got {echoed(choice)}")
    names = tuple(part.strip() for part in modules.split(",") if part.strip())
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise SettingsError(
                f"{source}-modules must be names of Python modules, got {echoed(name)}"
            )
    return WarmStart(names) if known[choice.lower()] else None


def _read(environ: Mapping[str, str]) -> AgentSettings:
    prefix = required(environ, "ELASTICJOB_PREFIX")
    shape = _PREFIX.fullmatch(prefix)
    if shape is None:
        raise SettingsError(
            "ELASTICJOB_PREFIX must be /elasticjob/<namespace>/<uid>/<incarnation>/, "
            f"got {echoed(prefix)}"
        )
    run_id = environ.get("ELASTICJOB_RUN_ID") or shape["uid"]
    backend, launch = _backend(environ), _launch(environ)
    folder = environ.get("ELASTICJOB_LOG_DIR", "")
    control = environ.get(CONTROL, "")
    port = environ.get("ELASTICJOB_HEALTH_PORT", "")
    return AgentSettings(
        prefix=prefix,
        run_id=run_id,
        member=segment(environ, "ELASTICJOB_MEMBER_ID"),
        name=required(environ, "ELASTICJOB_NAME"),
        address=address(environ, "ELASTICJOB_ADDRESS"),
        etcd=_etcd(environ),
        job_key=secret(environ, "ELASTICJOB_JOB_KEY_FILE"),
        backend=backend,
        rendezvous_id=f"{shape['uid']}-{shape['incarnation']}",
        bounds=None if backend is Backend.ETCD else _bounds(environ),
        hosts_store=environ.get("ELASTICJOB_STORE_HOST") == "true",
        slots=None if launch is Launch.PER_NODE else _slots(environ),
        launch=launch,
        nnodes=_nnodes(environ),
        nproc=_torchrun_workers(environ),
        node=environ.get("ELASTICJOB_NODE", ""),
        role=environ.get("ELASTICJOB_ROLE") or "default",
        socket=environ.get("ELASTICJOB_SOCKET") or "/elasticjob/launcher.sock",
        logs=LogSettings(
            folder=Path(folder) / run_id if folder else None,
            max_bytes=max_log_bytes(environ),
            keep_rounds=whole(environ, "ELASTICJOB_KEEP_ROUNDS", KEEP_ROUNDS, least=1),
            shared=True,
            total_bytes=whole(environ, "ELASTICJOB_TOTAL_LOG_BYTES", 0) or None,
        ),
        stop_grace_seconds=seconds(environ, "ELASTICJOB_STOP_GRACE_SECONDS", 10.0),
        keep_alive_seconds=seconds(
            environ, "ELASTICJOB_KEEP_ALIVE_SECONDS", 5.0, LEAST_KEEP_ALIVE_SECONDS
        ),
        orphan_seconds=seconds(environ, "ELASTICJOB_ORPHAN_SECONDS", 30.0),
        hang_seconds=seconds(environ, "ELASTICJOB_HANG_TIMEOUT_SECONDS", 0.0),
        bind_address=environ.get("ELASTICJOB_BIND_ADDRESS") or "0.0.0.0",
        control=Path(control) if control else None,
        health_port=whole(environ, "ELASTICJOB_HEALTH_PORT", 0, most=65535) if port else None,
        termination_log=_termination_log(environ),
        warm_start=warm_start_of(
            environ.get("ELASTICJOB_WARM_START") or "Auto",
            environ.get("ELASTICJOB_WARM_START_MODULES", ""),
            "ELASTICJOB_WARM_START",
        ),
    )


def _slots(environ: Mapping[str, str]) -> int | None:
    """Return the number of workers; None if the launcher counts them."""
    name = "ELASTICJOB_SLOTS"
    return None if environ.get(name) == COUNTED else whole(environ, name, 1, least=1, most=1024)


def _torchrun_workers(environ: Mapping[str, str]) -> str:
    """Return the number or word of workers for torchrun in the command; empty for its default."""
    if workers := environ.get("ELASTICJOB_NPROC"):
        return workers
    given = _slots(environ) if environ.get("ELASTICJOB_SLOTS") else None
    return "" if given is None else str(given)


def _backend(environ: Mapping[str, str]) -> Backend:
    text = environ.get("ELASTICJOB_BACKEND") or Backend.ETCD
    try:
        return Backend(text)
    except ValueError as error:
        known = ", ".join(Backend)
        raise SettingsError(
            f"ELASTICJOB_BACKEND must be one of {known}, got {echoed(text)}"
        ) from error


def _launch(environ: Mapping[str, str]) -> Launch:
    text = environ.get("ELASTICJOB_LAUNCH") or Launch.PER_WORKER
    try:
        return Launch(text)
    except ValueError as error:
        known = " or ".join(Launch)
        raise SettingsError(f"ELASTICJOB_LAUNCH must be {known}, got {echoed(text)}") from error


def _nnodes(environ: Mapping[str, str]) -> str:
    text = environ.get("ELASTICJOB_NNODES") or "1:1"
    if not _NNODES.fullmatch(text):
        raise SettingsError(f"ELASTICJOB_NNODES must be MIN:MAX, got {echoed(text)}")
    return text


def _bounds(environ: Mapping[str, str]) -> RendezvousParams:
    name = "ELASTICJOB_BOUNDS"
    try:
        return decode(RendezvousParams, name, required(environ, name).encode())
    except MalformedRecord as error:
        raise SettingsError(f"{name} must be a Bounds record as JSON: {error}") from error


def _etcd(environ: Mapping[str, str]) -> EtcdAccess:
    name = "ELASTICJOB_ENDPOINTS"
    files = {
        key: environ.get(f"ELASTICJOB_ETCD_{key}_FILE") or None for key in ("CA", "CERT", "KEY")
    }
    for key, path in files.items():
        if path is not None and not Path(path).is_file():
            raise SettingsError(f"ELASTICJOB_ETCD_{key}_FILE must be a file, got {echoed(path)}")
    if (files["CERT"] is None) != (files["KEY"] is None):
        raise SettingsError(
            "ELASTICJOB_ETCD_CERT_FILE and ELASTICJOB_ETCD_KEY_FILE must be set together"
        )
    server_name = environ.get("ELASTICJOB_ETCD_SERVER_NAME") or None
    tls = any(files.values()) or server_name is not None
    user = text_file(environ, "ELASTICJOB_ETCD_USER_FILE")
    password = text_file(environ, "ELASTICJOB_ETCD_PASSWORD_FILE")
    if (user is None) != (password is None):
        raise SettingsError(
            "ELASTICJOB_ETCD_USER_FILE and ELASTICJOB_ETCD_PASSWORD_FILE must be set together"
        )
    user_file = environ.get("ELASTICJOB_ETCD_USER_FILE")
    password_file = environ.get("ELASTICJOB_ETCD_PASSWORD_FILE")
    return EtcdAccess(
        endpoints=endpoints_of(required(environ, name), name),
        tls=Tls(files["CA"], files["CERT"], files["KEY"], server_name) if tls else None,
        user=user,
        password=password,
        login_files=LoginFiles(user_file, password_file) if user_file and password_file else None,
    )
