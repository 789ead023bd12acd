"""Checks of this machine, from gathered facts. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticjob_cli.doctor.findings import Finding, Unread, fail, ok, warn

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 5)
FILES_FAIL, FILES_WARN = 256, 1024
"""Open files: a run needs more than the first; an agent of a large job more than the second."""
PROCESSES_FAIL, PROCESSES_WARN = 64, 1024
LOCKED_WARN = 64 * 1024
SHM_FAIL, SHM_WARN = 16 << 20, 1 << 30
"""Free bytes of shared memory: NCCL and data loaders of one worker; of several workers."""
DISK_FAIL, DISK_WARN = 100 << 20, 2 << 30
OLDEST_CLOCK = 1_750_000_000.0
"""Unix time before this release: a clock with less was never set."""
MANY = "unlimited"
_WHOLE = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class LocalFacts:
    """Observations of this machine; None is an unlimited resource, bytes and seconds are plain."""

    python: tuple[int, ...]
    executable: str
    torch: str | Unread
    cuda: str | Unread
    cores: int
    ports: int | Unread
    shm: str
    shm_free: int | Unread
    shm_writable: bool
    limits: Mapping[str, int | None]
    etcd: str | Unread
    run_folder: str
    run_folder_trouble: str
    state_folder: str
    state_folder_trouble: str
    disk_free: Mapping[str, int] = field(default_factory=dict)
    clock_unix: float = 0.0
    clock_synchronized: bool | None = None


def local_findings(facts: LocalFacts) -> list[Finding]:
    """Return the findings of all checks of this machine."""
    return [
        python_finding(facts),
        torch_finding(facts),
        cuda_finding(facts),
        etcd_finding(facts),
        ports_finding(facts),
        shm_finding(facts),
        *limit_findings(facts),
        *folder_findings(facts),
        *disk_findings(facts),
        clock_finding(facts),
        cores_finding(facts),
    ]


def python_finding(facts: LocalFacts) -> Finding:
    version = ".".join(map(str, facts.python[:3]))
    if facts.python[:2] < OLDEST_PYTHON:
        return fail(
            "python",
            f"{version} ({facts.executable})",
            f"install Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer",
        )
    return ok("python", f"{version} ({facts.executable})")


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, such as (2, 5) of `2.5.1+cu124`."""
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int(part) if _WHOLE.fullmatch(part) else 0 for part in parts)


def torch_finding(facts: LocalFacts) -> Finding:
    if isinstance(facts.torch, Unread):
        remedy = "install torch into the environment of the training script"
        return warn("torch", facts.torch.message, remedy)
    if _release(facts.torch) < OLDEST_TORCH:
        return fail("torch", facts.torch, "install torch 2.5 or newer")
    return ok("torch", facts.torch)


def cuda_finding(facts: LocalFacts) -> Finding:
    if isinstance(facts.cuda, Unread):
        return warn("cuda", facts.cuda.message, "repair torch or the driver, if jobs use GPUs")
    return ok("cuda", facts.cuda)


def etcd_finding(facts: LocalFacts) -> Finding:
    if isinstance(facts.etcd, Unread):
        remedy = "a local job with rendezvous.backend Etcd cannot start without it"
        return fail("etcd", facts.etcd.message, remedy)
    return ok("etcd", facts.etcd)


def ports_finding(facts: LocalFacts) -> Finding:
    if isinstance(facts.ports, Unread):
        remedy = "bring the loopback interface up, or widen net.ipv4.ip_local_port_range"
        return fail("loopback ports", facts.ports.message, remedy)
    return ok("loopback ports", f"{facts.ports} bound on 127.0.0.1")


def size(number: int) -> str:
    """Format a number of bytes as `512 MiB` or `1.5 GiB`."""
    if number >= 1 << 30:
        return f"{number / (1 << 30):.1f} GiB"
    return f"{number // (1 << 20)} MiB"


def shm_finding(facts: LocalFacts) -> Finding:
    check, free = "shared memory", facts.shm_free
    if isinstance(free, Unread):
        return fail(check, f"{facts.shm}: {free.message}", f"mount a tmpfs at {facts.shm}")
    if not facts.shm_writable:
        return fail(check, f"{facts.shm} cannot be written", f"chmod 1777 {facts.shm}")
    found = f"{size(free)} free in {facts.shm}"
    remedy = f"delete what is left in {facts.shm}, or mount it larger (docker: --shm-size)"
    if free < SHM_FAIL:
        return fail(check, found, remedy)
    return warn(check, found, remedy) if free < SHM_WARN else ok(check, found)


def limit_findings(facts: LocalFacts) -> list[Finding]:
    """Return the findings on the limits of open files, processes and locked memory."""
    found = []
    thresholds = {
        "nofile": (FILES_FAIL, FILES_WARN),
        "nproc": (PROCESSES_FAIL, PROCESSES_WARN),
        "memlock": (0, LOCKED_WARN),
    }
    for name, (least, enough) in thresholds.items():
        limit, check = facts.limits[name], f"ulimit {name}"
        remedy = f"raise it in /etc/security/limits.conf to at least {enough}, then log in again"
        if limit is None:
            found.append(ok(check, MANY))
        elif limit < least:
            found.append(fail(check, str(limit), remedy))
        else:
            grade = warn(check, str(limit), remedy) if limit < enough else ok(check, str(limit))
            found.append(grade)
    return found


def folder_findings(facts: LocalFacts) -> list[Finding]:
    """Return the findings on the folders of runs and of their state."""
    folders = (
        ("run folder", facts.run_folder, facts.run_folder_trouble, "TMPDIR"),
        ("state folder", facts.state_folder, facts.state_folder_trouble, "XDG_STATE_HOME"),
    )
    return [
        fail(check, f"{path}: {trouble}", f"set {variable} to a folder of yours")
        if trouble
        else ok(check, path)
        for check, path, trouble, variable in folders
    ]


def disk_findings(facts: LocalFacts) -> list[Finding]:
    """Return one finding for each folder of runs."""
    found = []
    for path, free in facts.disk_free.items():
        text = f"{size(free)} free in {path}"
        remedy = "free space: `elasticjob delete --finished` removes the logs of ended jobs"
        if free < DISK_FAIL:
            found.append(fail("disk", text, remedy))
        else:
            found.append(warn("disk", text, remedy) if free < DISK_WARN else ok("disk", text))
    return found


def clock_finding(facts: LocalFacts) -> Finding:
    if facts.clock_unix < OLDEST_CLOCK:
        return fail("clock", "set to a time before this release", "set the clock: start NTP")
    if facts.clock_synchronized is False:
        remedy = "start chrony or systemd-timesyncd; several machines of one job must agree"
        return warn("clock", "not synchronized", remedy)
    return ok("clock", "synchronized" if facts.clock_synchronized else "plausible")


def cores_finding(facts: LocalFacts) -> Finding:
    found = f"{facts.cores} usable"
    if facts.cores < 2:
        return warn("cores", found, "expect slow starts: agent and worker share one core")
    return ok("cores", found)
