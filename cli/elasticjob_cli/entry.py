"""Console-script entry points: Ctrl-C during imports ends the program without a traceback.

Imports outside the guards would still show one, so there are as few as possible.
"""

import os

INTERRUPTED = 130


def main() -> None:
    """Run the console script `elasticjob`."""
    try:
        exit_at_ctrl_c()
        from elasticjob_cli.main import main as run

        run()
    except KeyboardInterrupt:
        interrupted()


def kubectl() -> None:
    """Run the console script `kubectl-elasticjob`, the kubectl plug-in."""
    try:
        exit_at_ctrl_c()
        from elasticjob_cli.main import kubectl as run

        run()
    except KeyboardInterrupt:
        interrupted()


def kubectl_complete() -> None:
    """Run the console script `kubectl_complete-elasticjob`, kubectl's completion of the plug-in."""
    try:
        exit_at_ctrl_c()
        from elasticjob_cli.main import kubectl_complete as run

        run()
    except KeyboardInterrupt:
        interrupted()


def exit_at_ctrl_c() -> None:
    """Make Ctrl-C exit at once: some libraries swallow KeyboardInterrupt during their import."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)


def interrupted(*_: object) -> None:
    """Exit at once: nothing is running yet that needs cleanup."""
    os._exit(INTERRUPTED)
