"""Changes to the machine outside the cluster's namespaces, and their reversal.

Nodes run systemd, kubelets and kube-proxies as root on the machine's kernel, and some kernel
settings have no namespace. A file keeps their former values until the cluster is gone.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.places import STATE

_SYSCTL = Path("/proc/sys")
_BEFORE = STATE / "sysctl.json"
_CHANGED = (  # by the kubelet, a node's systemd or this module
    *("fs/file-max", "fs/nr_open", "fs/inotify/max_user_instances", "fs/inotify/max_user_watches"),
    *("kernel/core_pattern", "kernel/keys/root_maxbytes", "kernel/keys/root_maxkeys"),
    *("kernel/panic", "kernel/panic_on_oops", "kernel/pid_max"),
    *("vm/max_map_count", "vm/overcommit_memory", "vm/panic_on_oom"),
)
# Every kubelet, kube-proxy and containerd uses some; Debian's default suffices for one node.
_RAISED = {"fs/inotify/max_user_instances": 8192, "fs/inotify/max_user_watches": 524288}

CGROUP = "elasticjob-cluster"  # parent of every node's control groups


def prepare() -> None:
    """Save the current settings unless already saved, and raise those that are too low."""
    now = {name: (_SYSCTL / name).read_text() for name in _CHANGED if (_SYSCTL / name).exists()}
    if not _BEFORE.exists():
        _BEFORE.write_text(json.dumps(now))
    for name, least in _RAISED.items():
        if int(now[name]) < least:
            (_SYSCTL / name).write_text(str(least))


def restored() -> bool:
    """Restore every setting and remove the nodes' control groups; return False if one is in use."""
    if _BEFORE.exists():
        for name, value in json.loads(_BEFORE.read_text()).items():
            if (_SYSCTL / name).read_text() != value:
                (_SYSCTL / name).write_text(value)
    try:
        for group in _groups():
            group.rmdir()
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    _BEFORE.unlink(missing_ok=True)
    return True


def _groups(root: Path = Path("/sys/fs/cgroup")) -> Iterator[Path]:
    """Yield the control groups of the nodes, innermost first.

    The search covers all of /sys/fs/cgroup: in some hierarchies they lie beneath the group of the
    process that started the engine.
    """
    for folder, _, _ in os.walk(root, topdown=False):
        path = Path(folder)
        if CGROUP in path.parts:
            yield path
