"""Facts about this machine for `elasticjob doctor`. The edge: it reads, and decides nothing."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from elasticjob_cli.doctor.findings import Unread
from elasticjob_cli.doctor.local_checks import LocalFacts
from elasticjob_cli.errors import CommandError, no_answer
from elasticjob_cli.settings import base_environment, run_dir, state_root

SHM = Path("/dev/shm")
PORTS = 64
"""Number of loopback ports to bind at the same time; a local job needs fewer."""
TORCH_SECONDS = 120.0
REQUEST_SECONDS = 5.0
PRIVATE_UMASK = 0o077
_LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "memlock": resource.RLIMIT_MEMLOCK,
}
_TORCH = """
import torch
available = torch.cuda.is_available()
names = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
print(torch.__version__)
print(", ".join(names) if available else "no CUDA device is visible: jobs use the CPU")
"""
_TIME_ERROR, _STATUS_UNSYNC = 5, 0x40


def gather_local(shm: Path = SHM) -> LocalFacts:
    """Read all facts; an error becomes part of them."""
    torch, cuda = _torch()
    state = state_root()
    runs = Path(tempfile.gettempdir())
    places = (_existing(state), runs)
    return LocalFacts(
        python=tuple(sys.version_info[:3]),
        executable=sys.executable,
        torch=torch,
        cuda=cuda,
        cores=len(os.sched_getaffinity(0)),
        ports=_ports(),
        shm=str(shm),
        shm_free=_free(shm),
        shm_writable=os.access(shm, os.W_OK),
        limits={name: _limit(which) for name, which in _LIMITS.items()},
        etcd=_etcd(),
        run_folder=str(runs),
        run_folder_trouble=_write_trouble(runs),
        state_folder=str(state),
        state_folder_trouble=_write_trouble(_existing(state)),
        disk_free={str(path): shutil.disk_usage(path).free for path in dict.fromkeys(places)},
        clock_unix=time.time(),
        clock_synchronized=_clock_synchronized(),
    )


def _existing(path: Path) -> Path:
    """Return the nearest folder that exists: the others are created by the first run."""
    return next(one for one in (path, *path.parents) if one.is_dir())


def _torch() -> tuple[str | Unread, str | Unread]:
    """Return torch's version and the visible devices, from a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH],
            env=base_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TORCH_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        text = f"torch cannot be imported: {no_answer(error)}"
        return Unread(text), Unread("unknown without torch")
    lines = done.stdout.splitlines()
    if done.returncode == 0 and len(lines) >= 2:
        return lines[-2], lines[-1]
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Unread(f"torch cannot be imported: {reason}"), Unread("unknown without torch")


def _ports() -> int | Unread:
    from elasticjob_cli.local.etcd import free_ports

    try:
        return len(free_ports(PORTS))
    except CommandError as error:
        return Unread(str(error))


def _free(path: Path) -> int | Unread:
    try:
        return shutil.disk_usage(path).free
    except OSError as error:
        return Unread(str(error.strerror))


def _limit(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _write_trouble(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x")
    except OSError as error:
        return str(error.strerror)
    return ""


class _Timex(ctypes.Structure):
    """Fields of `struct timex` up to the status; the kernel fills the padding behind them."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def _clock_synchronized() -> bool | None:
    """Return the kernel's state of the clock; None if it reports none."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        timex = _Timex()
        state = libc.adjtimex(ctypes.byref(timex))
    except (OSError, AttributeError):
        return None
    if state < 0:
        return None
    return state != _TIME_ERROR and not timex.status & _STATUS_UNSYNC


def _etcd() -> str | Unread:
    """Start the etcd of a local run, write a key and read it."""
    try:
        return asyncio.run(_tried_etcd())
    except CommandError as error:
        return Unread(str(error))
    except Exception as error:  # any failure of the trial is the finding
        return Unread(f"etcd cannot be used: {str(error) or type(error).__name__}")


async def _tried_etcd() -> str:
    from elasticjob_cli.local.etcd import EtcdServer, find_etcd
    from elasticjob_cli.local.processes import Processes
    from elasticjob_rendezvous.etcd.client import Client
    from elasticjob_rendezvous.protocol.kv import Put, Range

    program = await asyncio.to_thread(find_etcd)
    scratch = run_dir()
    processes = Processes(lambda _: None, lambda _: None)
    umask = os.umask(PRIVATE_UMASK)
    with tempfile.TemporaryFile() as lock:
        try:
            await processes.open(scratch.path, lock.fileno(), umask)
            try:
                server = EtcdServer(program, processes, scratch.path, scratch.path / "etcd.log")
                await server.start()
                async with Client(
                    [server.endpoint], request_timeout_seconds=REQUEST_SECONDS
                ) as client:
                    await client.put(Put("doctor", b"1"))
                    found = await client.range(Range("doctor"))
                    version = (await client.status()).version
            finally:
                await processes.aclose()
        finally:
            scratch.close()
            os.umask(umask)
    if [item.value for item in found.kvs] != [b"1"]:
        raise CommandError(f"{program} does not return the key that was written")
    return f"{program} {version}: started, wrote and read a key"
