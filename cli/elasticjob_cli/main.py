"""`elasticjob`: the commands and what their errors become."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from elasticjob_agent.launcher.stdstreams import open_missing
from elasticjob_cli import entry
from elasticjob_cli.errors import CommandError, ExitCode
from elasticjob_rendezvous.core.typed import bounded

if TYPE_CHECKING:  # loaded in `main`, where Ctrl-C is no traceback any more
    import typer

HELP = """Elastic PyTorch jobs on this machine.

`elasticjob run job.yaml` runs the manifest that a cluster runs, with processes as pods; the other
commands look at such jobs and change them, also after their end.
"""


def application(first: str) -> typer.Typer:
    """The command line. Where `first` is "agent" it knows nothing else.

    The agent starts on every node of a gang that waits for it; what the other commands
    import would cost it half a second.
    """
    import typer

    app = typer.Typer(
        help=HELP,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    if first == "agent":
        app.callback()(_group)
        _add_agent(app)
        return app
    from elasticjob_cli.commands import change, convert, explain, get, logs, run, validate

    app.command()(run.run)
    _add_agent(app)
    app.command()(get.get)
    app.command()(get.describe)
    app.command()(explain.explain)
    app.command()(change.scale)
    app.command()(change.delete)
    app.command()(logs.logs)
    app.command()(validate.validate)
    app.command()(convert.convert)
    app.command()(change.fault)
    app.command()(validate.version)
    return app


def plugin() -> typer.Typer:
    """The command line as kubectl's plug-in: what makes sense on a cluster."""
    import typer

    from elasticjob_cli.commands import convert, explain, validate

    app = typer.Typer(
        help="Elastic PyTorch jobs on a cluster.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command("explain")(explain.explain_on_cluster)
    app.command()(validate.validate)
    app.command()(convert.convert)
    app.command()(validate.version)
    return app


def _add_agent(app: typer.Typer) -> None:
    from elasticjob_cli import agent

    app.command(context_settings=agent.CONTEXT)(agent.agent)


def _group() -> None:
    """With a callback a single command keeps its name."""


def main() -> None:
    """The console script `elasticjob`."""
    _run(lambda: application(sys.argv[1] if len(sys.argv) > 1 else ""), "elasticjob")


def kubectl() -> None:
    """The console script `kubectl-elasticjob`, which kubectl calls for `kubectl elasticjob`."""
    _run(plugin, "kubectl elasticjob")


def _run(app: Callable[[], typer.Typer], name: str) -> None:
    """Errors become a line on standard error and an exit code."""
    open_missing()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # what a locale lacks must not end a command
            stream.reconfigure(errors="backslashreplace")
    try:
        _loaded(app)(prog_name=name)
    except CommandError as error:
        print(bounded(f"{name}: {error}"), file=sys.stderr)
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:  # while the command was being loaded
        sys.exit(int(ExitCode.INTERRUPTED))
    except BrokenPipeError:  # the reader of our output has had enough
        sys.stderr.close()
        sys.exit(int(ExitCode.FAILED))
    except OSError as error:
        print(bounded(f"{name}: {_told(error)}"), file=sys.stderr)
        if error.filename is None:
            sys.stderr.close()  # output that is left in a buffer would be tried once more
        sys.exit(int(ExitCode.FAILED))
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while Python ends is no traceback


def _loaded(app: Callable[[], typer.Typer]) -> typer.Typer:
    """The command line; from here on Ctrl-C is the command's own to handle."""
    entry.heed_ctrl_c()
    command = app()
    if signal.getsignal(signal.SIGINT) is entry.interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command


def _here() -> bool:
    """Whether there is a current folder."""
    try:
        Path.cwd()
    except OSError:
        return False
    return True


def _told(error: OSError) -> str:
    """What the machine refused, in words."""
    said = error.strerror or str(error)
    if error.filename is not None:
        return f"{error.filename}: {said}"
    match error.errno:
        case errno.ENOENT if not _here():
            return "the current folder was removed: change to another one"
        case errno.ENOSPC:
            return f"the output cannot be written: {said}"
    return said


if __name__ == "__main__":
    main()
