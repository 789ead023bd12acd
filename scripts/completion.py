"""Table of the commands' options for shell completion; with --check it fails if out of date."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer

from elasticjob_cli.main import COMMANDS, application

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "cli" / "elasticjob_cli" / "completion" / "table.json"
HIDDEN = ("-h", "--help")


def table() -> dict[str, Any]:
    """Return the options and the kind of arguments of each command."""
    return {name: _command(name) for name in COMMANDS}


def _command(name: str) -> dict[str, Any]:
    group: Any = typer.main.get_command(application(name))
    params = group.commands[name].params
    module, _, function = COMMANDS[name].partition(".")
    loaded = importlib.import_module(f"elasticjob_cli.commands.{module}")
    kinds = get_type_hints(getattr(loaded, function))
    arguments = [one for one in params if one.param_type_name == "argument"]
    options = [one for one in params if one.param_type_name == "option"]
    first = arguments[0] if arguments else None
    return {
        "argument": "" if first is None else str(first.metavar or first.name),
        "many": first is not None and first.nargs == -1,
        "choices": [] if first is None else _choices(kinds.get(first.name)),
        "options": [one for option in options for one in _options(option, kinds)],
    }


def _options(option: Any, kinds: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an entry for the option, and one for its opposite if it has one."""
    shared: dict[str, Any] = {"value": not option.is_flag, "many": bool(option.multiple)}
    help_line = str(option.help or "").partition("\n")[0]
    shared |= {"choices": _choices(kinds.get(option.name)), "help": help_line}
    names = (sorted(option.opts, key=len, reverse=True), list(option.secondary_opts))
    return [{"names": some, **shared} for some in names if some and not {*some} & {*HIDDEN}]


def _choices(kind: Any) -> list[str]:
    """Return the values of an enumeration, also of one that may be None or occur in a list."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [str(one) for one in kind]
    return [value for inner in get_args(kind) for value in _choices(inner)]


def main() -> int:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the file is out of date")
    wanted = json.dumps(table(), indent=1) + "\n"
    if not parser.parse_args().check:
        FILE.write_text(wanted)
        return 0
    if FILE.exists() and FILE.read_text() == wanted:
        return 0
    print(f"{FILE.relative_to(ROOT)} is out of date: make generate", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
