"""Programs as forks of a server that has imported torch: nine tenths of their start is its import.

`python forked_program.py SOCKET PROGRAM ARGUMENT...`, or with `-m MODULE` instead of a program, has
the server execute it with this process's environment, folder and streams. This process passes
SIGTERM and SIGINT on, and ends as the fork does; if it is killed, so is the fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_LENGTH = 4


# -- in the process that stands for the program: it imports no more than it needs ------------


def _represent(path: str, words: Sequence[str]) -> None:
    signals = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until the fork can get them
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        order = json.dumps([words, dict(os.environ), str(Path.cwd())]).encode()
        socket.send_fds(connection, [len(order).to_bytes(_LENGTH, "big")], [0, 1, 2])
        connection.sendall(order)
        pid = int.from_bytes(_received(connection, _LENGTH), "big")

        def pass_on(number: int, frame: object) -> None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(pid, number)

        for number in signals:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        code = os.waitstatus_to_exitcode(int.from_bytes(_received(connection, _LENGTH), "big"))
    if code < 0:
        if -code in signals:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _received(connection: socket.socket, length: int) -> bytes:
    found = b""
    while len(found) < length:
        if not (part := connection.recv(length - len(found))):
            raise SystemExit("the fork server closed the connection")
        found += part
    return found


# -- in the server -------------------------------------------------------------------------


def _serve(listener: socket.socket) -> None:
    """Fork a program for each connection, until this process or pytest's ends."""
    from multiprocessing import parent_process

    pytest = parent_process()
    assert pytest is not None
    running: dict[int, tuple[int, socket.socket]] = {}  # pid and connection by pidfd
    while True:
        connections = {connection.fileno(): pidfd for pidfd, (_, connection) in running.items()}
        awaited = [pytest.sentinel, listener.fileno(), *running, *connections]
        ready, _, _ = select.select(awaited, [], [])
        if pytest.sentinel in ready:
            return  # the forks end with this process
        for pidfd in {connections.get(each, each) for each in ready} & {*running}:
            pid, connection = running.pop(pidfd)
            if pidfd not in ready:  # its process was killed
                os.kill(pid, signal.SIGKILL)
            status = os.waitpid(pid, 0)[1]
            with connection:
                if pidfd in ready:
                    _send(connection, status)
            os.close(pidfd)
        if listener.fileno() in ready:
            connection = listener.accept()[0]
            if pid := _started(connection, listener):
                _send(connection, pid)
                running[os.pidfd_open(pid)] = (pid, connection)
            else:
                connection.close()


def _send(connection: socket.socket, number: int) -> None:
    with contextlib.suppress(ConnectionError):  # its process was killed meanwhile
        connection.sendall(number.to_bytes(_LENGTH, "big"))


def _started(connection: socket.socket, listener: socket.socket) -> int:
    """Return the pid of the fork; 0 if the process was killed before it had sent its order."""
    streams: list[int] = []
    try:
        header, streams, _, _ = socket.recv_fds(connection, _LENGTH, 3)
        order = _received(connection, int.from_bytes(header, "big")) if streams else b""
    except (ConnectionError, SystemExit):
        order = b""
    server = os.getpid()
    if not order or (pid := os.fork()):
        for each in streams:
            os.close(each)
        return pid if order else 0
    code = 1
    try:
        connection.close()
        listener.close()
        words, env, folder = json.loads(order)
        code = _execute(words, env, folder, streams, server)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _execute(
    words: list[str], env: dict[str, str], folder: str, streams: Sequence[int], server: int
) -> int:
    """Execute a program in this process as Python does; return its exit code."""
    import runpy
    import traceback

    from bench.processes import die_with_parent

    die_with_parent()
    if os.getppid() != server:
        return 1
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdout, sys.stderr = (os.fdopen(each, "w", 1, closefd=False) for each in (1, 2))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


# -- in the test ---------------------------------------------------------------------------


@contextlib.contextmanager
def forking_server() -> Iterator[tuple[str, str]]:
    """Yield the words between `python` and a program to have it forked by a server."""
    import tempfile

    from tests.integration.torch.forked_gang import fork_server

    with tempfile.TemporaryDirectory() as folder:  # short: paths of sockets are limited
        path = str(Path(folder, "forks"))
        with socket.create_server(path, family=socket.AF_UNIX) as listener:
            server = fork_server().Process(target=_serve, args=(listener,), daemon=True)
            server.start()
        try:
            yield str(Path(__file__).resolve()), path
        finally:
            server.kill()
            server.join()


if __name__ == "__main__":
    _represent(sys.argv[1], sys.argv[2:])
