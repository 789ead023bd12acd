"""Description of the machine that a measurement was taken on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

from bench import etcd_proc
from bench.settings import OUR_ETCD_VERSION, PEERS_ETCD_VERSION, etcd_binary

Facts = dict[str, str | int | float]


def machine_facts() -> Facts:
    """Return the hardware and the versions of the programs involved."""
    return {
        **hardware(),
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "etcd_ours": etcd_proc.version(etcd_binary(OUR_ETCD_VERSION)),
        "etcd_peers": etcd_proc.version(etcd_binary(PEERS_ETCD_VERSION)),
    }


def hardware() -> Facts:
    """Return CPU, memory, kernel and load average."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "cpu": _processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average_1m": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
