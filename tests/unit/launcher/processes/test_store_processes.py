"""End of a store whose port rank 0 is to bind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from elasticjob_launcher.processes.starter import _await_end

SERVER = """
import socket, time
held = bytearray(200 << 20)
sock = socket.create_server(("127.0.0.1", 0))
print(sock.getsockname()[1], flush=True)
time.sleep(100)
"""


def test_port_of_killed_store_is_free_after_its_end_was_awaited() -> None:
    for _ in range(5):
        server = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", SERVER], stdout=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        with server.stdout:
            port = int(server.stdout.readline())
        os.kill(server.pid, signal.SIGKILL)
        _await_end(server.pid)
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))
            sock.listen()
        pid, status = os.waitpid(server.pid, 0)
        assert (pid, os.WTERMSIG(status)) == (server.pid, signal.SIGKILL), "left to be reaped"
        server.returncode = -signal.SIGKILL


def test_reaped_process_is_not_awaited() -> None:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    process.wait()
    _await_end(process.pid)
