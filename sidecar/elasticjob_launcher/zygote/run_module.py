"""Execution of a program as `__main__` in an already running interpreter.

Follows the steps of `python script.py` and `python -m module`: the program sees the same
`__main__`, `sys.argv` and `sys.path`, and its failures print the same text.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple


class Target(NamedTuple):
    """Program to run; `command` is the full command line of a cold start."""

    module: bool
    name: str
    arguments: Sequence[str]
    command: Sequence[str]

    @property
    def path(self) -> str:
        """Path of a script or folder: absolute from Python 3.9 on, before that as given."""
        if sys.version_info < (3, 9):
            return self.name
        if self.name == "." and sys.version_info >= (3, 11):
            return os.getcwd()  # noqa: PTH109
        return os.path.join(os.getcwd(), self.name)  # noqa: PTH109, PTH118

    @property
    def is_folder(self) -> bool:
        """True if the target is a folder or archive with a `__main__.py`."""
        return not self.module and _importer(self.name) is not None


def set_argv_and_path(target: Target) -> None:
    """Set `sys.argv` and the first entry of `sys.path` as Python does before it runs the target.

    This interpreter was started with `-c`, so its `sys.path` begins with "" unless safe-path mode
    is on.
    """
    sys.argv = ["-m" if target.module else target.name, *target.arguments]
    if hasattr(sys, "orig_argv"):
        sys.orig_argv = list(target.command)
    if sys.path and sys.path[0] == "":
        if target.module:
            sys.path[0] = os.getcwd()  # noqa: PTH109
        elif target.is_folder:
            sys.path[0] = target.path
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(target.name))  # noqa: PTH120
    elif target.is_folder:
        sys.path.insert(0, target.path)


def unreadable_source(target: Target) -> str:
    """Return the reason to start a script cold, such as compiled code; empty for source text."""
    if target.module or target.is_folder:
        return ""
    try:
        with io.open_code(target.path) as file:
            source = file.read()
        if source.startswith(importlib.util.MAGIC_NUMBER):
            return f"{target.name} is compiled code: give the script itself"
        importlib.util.decode_source(source)
    except OSError:
        return ""  # the start reports it
    except (SyntaxError, UnicodeError, LookupError) as error:
        return f"{target.name} cannot be decoded: {error}"
    return f"{target.name} contains null bytes" if b"\0" in source else ""


def set_main_file(target: Target, files: Sequence[tuple[str, str]]) -> None:
    """Set `__main__.__file__`, by which packages distinguish a program from an interactive session.

    `files` are the files that run first, the last one as `__main__`.
    """
    main: Any = sys.modules["__main__"]
    if not target.module:
        main.__file__ = os.path.join(target.path, *(["__main__.py"] if target.is_folder else []))  # noqa: PTH118
    elif files:
        main.__file__ = files[-1][0]


def program_runner(target: Target) -> Callable[[], object]:
    """Return a function that runs the program without frames of ElasticJob.

    Raises the errors that Python raises before it runs a program.
    """
    importlib.invalidate_caches()
    run_module = runpy._run_module_as_main  # type: ignore[attr-defined]
    if target.module:
        vars(sys.modules["__main__"]).pop("__file__", None)  # its packages run without it
        return partial(run_module, target.name, True)
    if target.is_folder:
        return partial(run_module, "__main__", False)
    return _script(target.path)


def _script(path: str) -> Callable[[], object]:
    main: Any = sys.modules["__main__"]
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        sys.stderr.write(
            f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}\n"
        )
        raise SystemExit(2) from None
    main.__file__ = path
    main.__cached__ = None
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    # Without `dont_inherit`, this file's own `from __future__` imports would apply.
    code = compile(source, path, "exec", dont_inherit=True)
    return partial(exec, code, main.__dict__)


def _importer(path: str) -> Any:
    """Return the importer for a script path, found as Python does; None for a plain file."""
    for hook in sys.path_hooks:
        try:
            return hook(path)
        except ImportError:
            continue
    return None


def end_with_error(error: BaseException, finish: Callable[[], None]) -> None:
    """Arrange for the traceback to begin at the program's first line; call `finish` after it.

    `finish` takes milliseconds, in which a stack request would find no frame of the program.
    """
    # Bytecode in a zip file has the path that it was built with.
    here = os.path.dirname(end_with_error.__code__.co_filename)  # noqa: PTH120
    hook = getattr(sys, "excepthook", _show_without_hook)

    def shown(kind: Any, value: Any, traceback: Any) -> None:
        while traceback is not None and _is_ours(traceback.tb_frame.f_code.co_filename, here):
            traceback = traceback.tb_next
        value.__traceback__ = traceback
        if hasattr(sys, "last_traceback"):
            sys.last_traceback = traceback
        try:
            hook(kind, value, traceback)
        except Exception as failure:
            _show_failed_hook(failure, value)
        finally:
            finish()

    if isinstance(error, SystemExit):
        finish()
    else:
        sys.excepthook = shown


def _show_failed_hook(failure: BaseException, value: BaseException) -> None:
    """Report as Python does, without the frame that has called the hook."""
    for title, error, skipped in (
        ("Error in sys.excepthook:", failure, 1),
        ("\nOriginal exception was:", value, 0),
    ):
        traceback = error.__traceback__
        error.__traceback__ = traceback.tb_next if traceback and skipped else traceback
        _write_error(f"{title}\n")
        sys.__excepthook__(type(error), error, error.__traceback__)


def _show_without_hook(*error: Any) -> None:
    """Show an error as Python does if the program has removed `sys.excepthook`."""
    _write_error("sys.excepthook is missing\n")
    sys.__excepthook__(*error)


def _write_error(text: str) -> None:
    """Write as Python itself does, also if the program has closed or removed `sys.stderr`."""
    try:
        sys.stderr.write(text)
    except Exception:
        with suppress(OSError):
            os.write(2, text.encode())


def _is_ours(filename: str, here: str) -> bool:
    return filename == "<string>" or filename.startswith(here)
