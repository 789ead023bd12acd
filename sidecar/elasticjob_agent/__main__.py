"""`python -m elasticjob_agent`: agent beside a launcher, configured by `ELASTICJOB_*` variables.

Short-lived subcommands in the agent's container:

- `leave [REASON]` asks the running agent to leave the job with its node (`preStop` hook);
- `ready` exits 0 if the agent can take part in a round (readiness probe);
- `install-launcher FILE` writes the launcher to FILE, where the trainer finds it, and the package
  `elasticjob` beside it.

Exit codes: 0 the job succeeded or this node left; 1 the job failed or the launcher was lost;
2 bad settings; 3 the rendezvous refused this node or timed out; 4 the job was ended from outside;
70 internal error of the agent. Of the subcommands: 0 yes, 1 no, 2 wrong arguments; `leave` exits
0 if no agent runs.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

USAGE = "usage: python -m elasticjob_agent [leave [REASON] | ready | install-launcher FILE]"


def main(arguments: list[str]) -> int:
    """Run a subcommand. Each imports only what it needs: a probe must not load grpc."""
    match arguments:
        case []:
            # PID 1 of a container ignores SIGTERM until a handler is set, and the imports below
            # take a while. Nothing has started yet, so exit at once.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
            from elasticjob_agent.main import run_beside_launcher

            return run_beside_launcher()
        case ["leave", *reason]:
            return _leave(" ".join(reason) or "its container is to stop")
        case ["ready"]:
            return _ready()
        case ["install-launcher", file]:
            return _install_launcher(file)
    return _failed(f"{USAGE}, got {' '.join(arguments)}", code=2)


_PR_SET_DUMPABLE = 4


def _hide_memory() -> None:
    """Close this process's files, memory and environment in /proc to others of the same user.

    With `shareProcessNamespace` the trainer could otherwise read the agent's Secret in
    /proc/PID/root. A system without the call runs the agent unprotected, as before.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        _failed(f"cannot protect this process's memory: {os.strerror(ctypes.get_errno())}")


def _leave(reason: str) -> int:
    from elasticjob_agent.control import AgentAbsent, NoAnswer, leave

    try:
        leave(reason)
    except AgentAbsent as error:
        # Success: the kubelet also stops a sidecar whose agent has already ended.
        return _failed(str(error), code=0)
    except NoAnswer as error:
        return _failed(str(error))
    return 0


def _ready() -> int:
    from elasticjob_agent.control import NoAnswer, is_ready

    try:
        return 0 if is_ready() else _failed("not ready: no launcher yet, or no lease in etcd")
    except NoAnswer as error:
        return _failed(str(error))


def _install_launcher(file: str) -> int:
    from pathlib import Path

    from elasticjob_agent.zipapp_build import install

    try:
        install(Path(file))
    except OSError as error:
        return _failed(
            f"cannot write the launcher to {file}: {error.strerror}; "
            "its folder must be writable for this user"
        )
    return 0


def _failed(message: str, code: int = 1) -> int:
    sys.stderr.write(f"elasticjob: {message}\n")
    return code


if __name__ == "__main__":
    _hide_memory()  # the commands too, for they run beside the Secret
    sys.exit(main(sys.argv[1:]))
