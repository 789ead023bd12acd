"""Conversion of a round's start command to the workers' commands, variables and files."""

from __future__ import annotations

from elasticjob_agent.core.model import StartCrew
from elasticjob_agent.core.ranks import (
    Run,
    WorkerFiles,
    shared_environment,
    worker_environment,
)
from elasticjob_agent.hands import Hello, PrepareWorkers, StartWorkers, WorkerStart
from elasticjob_agent.logs import RunLogs
from elasticjob_agent.progress import ProgressFiles


def prepare_workers(
    hello: Hello, slots: int, modules: tuple[str, ...], memory: str, dumps: bool
) -> PrepareWorkers:
    """Return the command and variables that this node's workers share in all rounds."""
    env = shared_environment(slots, hello.env_names, dumps)
    return PrepareWorkers(hello.argv, env, modules, memory)


def start_workers(
    command: StartCrew,
    hello: Hello,
    logs: RunLogs | None,
    progress: ProgressFiles | None,
    run_id: str,
    max_log_bytes: int,
    dumps: bool,
) -> StartWorkers:
    """Return the order to start this node's workers of a round.

    Args:
        logs: None for workers without log and error files.
        progress: None for workers that cannot report progress.
        dumps: workers can dump the stacks of their threads.
    """
    number = command.roster.number
    run = Run(run_id, command.max_restarts, dumps)
    workers = []
    for local_rank in range(command.seat.slots):
        folder = None if logs is None else logs.worker(number, local_rank)
        error_file = None if logs is None else logs.error_file(number, local_rank)
        files = WorkerFiles(
            error="" if error_file is None else str(error_file),
            progress="" if progress is None else str(progress.file(number, local_rank)),
            request="" if progress is None else str(progress.request_file(number)),
            saved="" if progress is None else str(progress.saved_file(number, local_rank)),
        )
        env = worker_environment(
            command.roster, command.seat, local_rank, run, files, hello.env_names
        )
        workers.append(
            WorkerStart(
                local_rank=local_rank,
                argv=hello.argv,
                env=env,
                log_dir="" if folder is None else str(folder),
                prefix=f"[{command.seat.base_rank + local_rank}] ",
            )
        )
    return StartWorkers(number, tuple(workers), max_log_bytes)
