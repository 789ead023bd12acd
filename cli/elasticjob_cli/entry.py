"""Where the programs begin: a Ctrl-C while they are being loaded ends them without a word.

Whatever is imported outside of the guards is one more moment in which it is a traceback.
"""

import os

INTERRUPTED = 130


def main() -> None:
    """The console script `elasticjob`."""
    try:
        heed_ctrl_c()
        from elasticjob_cli.main import main as run

        run()
    except KeyboardInterrupt:
        interrupted()


def kubectl() -> None:
    """The console script `kubectl-elasticjob`, which kubectl calls for `kubectl elasticjob`."""
    try:
        heed_ctrl_c()
        from elasticjob_cli.main import kubectl as run

        run()
    except KeyboardInterrupt:
        interrupted()


def heed_ctrl_c() -> None:
    """Not as an exception: there are libraries that print it and go on with their import."""
    import signal

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupted)


def interrupted(*_: object) -> None:
    """End at once: nothing has begun that would have to be ended."""
    os._exit(INTERRUPTED)
