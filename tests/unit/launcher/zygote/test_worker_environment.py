"""Process title of a forked worker: its command line as `ps` shows it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = r"""
import ctypes, platform
from elasticjob_launcher.zygote import worker_environment

libc = ctypes.CDLL(None)
libc.sbrk.restype = ctypes.c_void_p
libc.syscall.restype = ctypes.c_long
number = {"x86_64": 12, "aarch64": 214}[platform.machine()]

class Grown(worker_environment._MemoryMap):
    def __init__(self, **fields):
        super().__init__(**fields)
        libc.sbrk(ctypes.c_long(1 << 20))

worker_environment._MemoryMap = Grown
worker_environment.show_process_as(["python", "t.py"], {})
print(open("/proc/self/cmdline").read().split("\0"))
print(libc.syscall(number, ctypes.c_ulong(0)) - libc.sbrk(0))
"""


def test_heap_that_grows_while_the_title_is_set_keeps_its_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True
    )
    title, difference = done.stdout.splitlines()
    if title != "['python', 't.py', '']":
        pytest.skip("this kernel cannot set the end of the arguments")
    assert difference == "0"
