"""Entry point: `python3 launcher.pyz -- COMMAND [ARGUMENT ...]`."""

from __future__ import annotations

import os
import sys

from .app import Launcher
from .settings import SettingsError, from_process

EXIT_USAGE = 2


def main() -> None:
    """Never returns: a writer thread stuck on a dead disk must not hold up the end."""
    try:
        exit_code = Launcher(from_process(), os.environ).run()
    except SettingsError as error:
        sys.stderr.write(f"elasticjob launcher: {error}\n")
        exit_code = EXIT_USAGE
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    main()
