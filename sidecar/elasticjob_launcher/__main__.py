"""Entry point: `python3 launcher.pyz [OPTION ...] -- COMMAND [ARGUMENT ...]`."""

from __future__ import annotations

import os
import signal
import sys

EXIT_USAGE = 2
EXIT_TOLD = 128 + signal.SIGTERM


def main() -> None:
    """Run the launcher and exit with `os._exit`: a writer thread on a dead disk must not block."""
    # The first process of a container ignores SIGTERM until a handler is set.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_TOLD))
    from elasticjob_launcher.standard_streams import open_missing

    open_missing()
    from elasticjob_launcher.app import Launcher
    from elasticjob_launcher.preparation import PreparationFailed, prepare
    from elasticjob_launcher.processes.spawn import fork_launcher
    from elasticjob_launcher.settings import SettingsError, from_process

    try:
        settings = from_process()
        init_fd = None
        if settings.init:
            settings = settings._replace(lifeline_pid=settings.lifeline_pid or os.getppid())
            init_fd = fork_launcher()
        prepared = prepare(settings, os.environ, init_fd)
        settings = settings._replace(argv=prepared.argv)
        exit_code = Launcher(settings, prepared.environ, init_fd=init_fd).run()
    except PreparationFailed as error:  # said where it happened
        exit_code = error.exit_code
    except SettingsError as error:
        print(f"elasticjob launcher: {error}", file=sys.stderr, flush=True)  # noqa: T201
        exit_code = EXIT_USAGE
    os._exit(exit_code)


if __name__ == "__main__":
    main()
