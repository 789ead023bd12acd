"""Command line of `elasticjob`: its commands and the handling of their errors."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from elasticjob_cli import entry
from elasticjob_cli.errors import CommandError, ExitCode
from elasticjob_launcher.standard_streams import open_missing
from elasticjob_rendezvous.protocol.text import bounded

if TYPE_CHECKING:  # imported in `main`, where Ctrl-C no longer shows a traceback
    import typer

HELP = """Elastic PyTorch jobs on this machine.

`elasticjob run job.yaml` runs the same manifest as a cluster does, with processes as pods. The
other commands inspect and change such jobs, also after their end.
"""


def application(first: str) -> typer.Typer:
    """Return the command line; if `first` is "agent", with that command alone.

    The agent starts on every node while the others wait for it; importing the other commands would
    take half a second.
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
    """Return the command line of the kubectl plug-in: the commands that apply to a cluster."""
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
    from elasticjob_cli.commands import agent

    app.command(context_settings=agent.CONTEXT)(agent.agent)


def _group() -> None:
    """Do nothing; with a callback a single command keeps its name."""


def main() -> None:
    """Run the console script `elasticjob`."""
    _run(lambda: application(sys.argv[1] if len(sys.argv) > 1 else ""), "elasticjob")


def kubectl() -> None:
    """Run the console script `kubectl-elasticjob`, the kubectl plug-in."""
    _run(plugin, "kubectl elasticjob")


def _run(app: Callable[[], typer.Typer], name: str) -> None:
    """Run a command line; turn errors into a line on standard error and an exit code."""
    open_missing()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # unencodable characters must not end a command
            stream.reconfigure(errors="backslashreplace")
    try:
        _load(app)(prog_name=name)
    except CommandError as error:
        print(bounded(f"{name}: {error}"), file=sys.stderr)
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:  # while the command was being loaded
        sys.exit(int(ExitCode.INTERRUPTED))
    except BrokenPipeError:  # the reader closed our output
        sys.stderr.close()
        sys.exit(int(ExitCode.FAILED))
    except OSError as error:
        print(bounded(f"{name}: {_os_error_text(error)}"), file=sys.stderr)
        if error.filename is None:
            sys.stderr.close()  # else buffered output would be flushed again at exit
        sys.exit(int(ExitCode.FAILED))
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C at exit


def _load(app: Callable[[], typer.Typer]) -> typer.Typer:
    """Return the command line; from here on the command itself handles Ctrl-C."""
    entry.heed_ctrl_c()
    command = app()
    if signal.getsignal(signal.SIGINT) is entry.interrupted:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return command


def _folder_exists() -> bool:
    """Return True if the current folder exists."""
    try:
        Path.cwd()
    except OSError:
        return False
    return True


def _os_error_text(error: OSError) -> str:
    """Return the message for an operating system error."""
    said = error.strerror or str(error)
    if error.filename is not None:
        return f"{error.filename}: {said}"
    match error.errno:
        case errno.ENOENT if not _folder_exists():
            return "the current folder was removed: change to another one"
        case errno.ENOSPC:
            return f"the output cannot be written: {said}"
    return said


if __name__ == "__main__":
    main()
