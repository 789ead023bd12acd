"""Command line of `elasticjob`: its commands and the handling of their errors."""

from __future__ import annotations

import errno
import importlib
import signal
import sys
from collections.abc import Callable, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from elasticjob_cli import entry
from elasticjob_cli.errors import CommandError, ExitCode
from elasticjob_cli.output import show_error
from elasticjob_launcher.standard_streams import open_missing

if TYPE_CHECKING:  # imported in `main`, where Ctrl-C no longer shows a traceback
    import typer

HELP = """Elastic PyTorch jobs on this machine.

`elasticjob run job.yaml` runs the same manifest as a cluster does, with processes as pods. The
other commands inspect and change such jobs, also after their end.
"""


COMMANDS = {
    "run": "run.run",
    "agent": "agent.agent",
    "get": "get.get",
    "describe": "get.describe",
    "explain": "explain.explain",
    "scale": "change.scale",
    "delete": "change.delete",
    "logs": "logs.logs",
    "validate": "validate.validate",
    "convert": "convert.convert",
    "fault": "change.fault",
    "version": "validate.version",
}
"""Module and function of each command, in the order of the help."""
CLUSTER_COMMANDS = {
    "explain": "explain.explain_on_cluster",
    "validate": "validate.validate",
    "convert": "convert.convert",
    "version": "validate.version",
}
"""Those of the kubectl plug-in, which apply to a cluster."""


def application(first: str) -> typer.Typer:
    """Return the command line of `elasticjob`; see `_application`."""
    return _application(HELP, COMMANDS, first)


def plugin(first: str) -> typer.Typer:
    """Return the command line of the kubectl plug-in; see `_application`."""
    return _application("Elastic PyTorch jobs on a cluster.", CLUSTER_COMMANDS, first)


def _application(text: str, commands: Mapping[str, str], first: str) -> typer.Typer:
    """Return a command line, with the command `first` alone if it has one of that name.

    Importing the other commands takes up to a second, and the agent starts on every node while the
    others wait for it.
    """
    import typer

    app = typer.Typer(
        help=text,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_group)
    for name in [first] if first in commands else commands:
        module_name, _, function = commands[name].partition(".")
        module = importlib.import_module(f"elasticjob_cli.commands.{module_name}")
        settings = getattr(module, "CONTEXT", None)
        app.command(name, context_settings=settings)(getattr(module, function))
    return app


def _group() -> None:
    """Do nothing; with a callback a single command keeps its name."""


def main() -> None:
    """Run the console script `elasticjob`."""
    _run(application, "elasticjob")


def kubectl() -> None:
    """Run the console script `kubectl-elasticjob`, the kubectl plug-in."""
    _run(plugin, "kubectl elasticjob")


def _run(app: Callable[[str], typer.Typer], name: str) -> None:
    """Run a command line; turn errors into a line on standard error and an exit code."""
    open_missing()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # unencodable characters must not end a command
            stream.reconfigure(errors="backslashreplace")
    try:
        _load(app)(prog_name=name)
    except CommandError as error:
        show_error(f"{name}: {error}")
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:  # while the command was being loaded
        sys.exit(int(ExitCode.INTERRUPTED))
    except BrokenPipeError:  # the reader closed our output
        sys.stderr.close()
        sys.exit(int(ExitCode.FAILED))
    except OSError as error:
        show_error(f"{name}: {_os_error_text(error)}")
        if error.filename is None:
            sys.stderr.close()  # else buffered output would be flushed again at exit
        sys.exit(int(ExitCode.FAILED))
    finally:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback for Ctrl-C at exit


def _load(app: Callable[[str], typer.Typer]) -> typer.Typer:
    """Return the command line; from here on the command itself handles Ctrl-C."""
    entry.heed_ctrl_c()
    command = app(sys.argv[1] if len(sys.argv) > 1 else "")
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
