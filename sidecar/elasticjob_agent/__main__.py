"""`python -m elasticjob_agent`: the agent beside a launcher, told by `ELASTICJOB_*` variables.

`python -m elasticjob_agent leave [REASON]` tells the running one that its node is to go: a
container's `preStop`.

Exit codes: 0 the job succeeded or this node left; 1 the job failed or the launcher was lost;
2 bad settings; 3 the rendezvous refused this node or timed out; 4 the job was ended from outside;
70 a fault of the agent itself.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from elasticjob_agent import settings as agent_settings
from elasticjob_agent.core.model import ExitCode
from elasticjob_agent.health import ask_to_leave
from elasticjob_agent.settings import SettingsError
from elasticjob_agent.termination import write_termination
from elasticjob_agent.wiring import launcher_hands, run_agent, session_nonce, to_standard_error

log = logging.getLogger("elasticjob.agent")


def main(arguments: list[str]) -> int:
    to_standard_error()
    try:
        match arguments:
            case []:
                return _agent()
            case ["leave", *reason]:
                return _leave(" ".join(reason) or "its container is to stop")
    except SettingsError as error:
        log.error("%s", error)
        write_termination(agent_settings.told_termination_log(), str(error))
        return ExitCode.USAGE
    log.error("usage: python -m elasticjob_agent [leave [REASON]], got %s", " ".join(arguments))
    return ExitCode.USAGE


def _agent() -> int:
    settings = agent_settings.from_environment()
    session = session_nonce()
    ending = asyncio.run(run_agent(settings, launcher_hands(settings, session), session))
    level = logging.INFO if ending.code is ExitCode.OK else logging.ERROR
    log.log(level, "%s: %s", settings.name, ending.message)
    return ending.code


def _leave(reason: str) -> int:
    control = agent_settings.control_socket()
    try:
        asyncio.run(ask_to_leave(control, reason))
    except (OSError, TimeoutError) as error:
        log.error("no agent answers at %s: %s", control, error)
        return ExitCode.FAILED
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
