"""Entry point: `python3 launcher.pyz [OPTION ...] -- COMMAND [ARGUMENT ...]`."""

from __future__ import annotations

import os
import signal
import sys

EXIT_USAGE = 2
EXIT_TERMINATED = 128 + signal.SIGTERM


def write_line(text: str) -> None:
    print(f"elasticjob launcher: {text}", file=sys.stderr, flush=True)  # noqa: T201


def main() -> None:
    """Run the launcher and exit with `os._exit`: a writer thread on a dead disk must not block."""
    # The first process of a container ignores SIGTERM until a handler is set.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_TERMINATED))
    from elasticjob_launcher.standard_streams import open_missing

    open_missing()
    from elasticjob_launcher.app import Launcher
    from elasticjob_launcher.devices import CountError
    from elasticjob_launcher.preparation import PreparationFailed, prepare
    from elasticjob_launcher.processes.output import write_termination_message
    from elasticjob_launcher.processes.spawn import fork_launcher
    from elasticjob_launcher.programs.program_check import (
        ProgramError,
        cleared_environment,
        node_launch,
    )
    from elasticjob_launcher.settings import SettingsError, from_process, worker_environment
    from elasticjob_launcher.worker_count import count_workers

    try:
        settings = from_process()
        init_fd = None
        if settings.init:
            settings = settings._replace(lifeline_pid=settings.lifeline_pid or os.getppid())
            init_fd = fork_launcher()
        prepared = prepare(settings, os.environ, init_fd)
        settings = settings._replace(argv=prepared.argv)
        reason = node_launch(settings, prepared.environ)
        workers = None
        note = cleared_environment(settings.argv, prepared.environ)
        if reason:
            write_line(f"the command is run once for the node: {reason}")
        elif settings.nproc:
            # Before the agent can connect: a launcher that cannot count has failed to launch.
            env = worker_environment(prepared.environ, settings.library)
            counted = count_workers(settings.nproc, settings.argv, env, settings.count_seconds)
            workers = counted.workers
            if counted.note:
                write_line(counted.note)
        launcher = Launcher(settings, prepared.environ, None, init_fd, workers, reason, note)
        exit_code = launcher.run()
    except PreparationFailed as error:  # logged where it happened
        exit_code = error.exit_code
    except (CountError, ProgramError) as error:
        write_line(str(error))
        write_termination_message(settings.termination_log, str(error))
        exit_code = EXIT_USAGE
    except SettingsError as error:
        write_line(str(error))
        exit_code = EXIT_USAGE
    os._exit(exit_code)


if __name__ == "__main__":
    main()
