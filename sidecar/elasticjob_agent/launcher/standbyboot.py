"""Start command of the zygote process, which runs this package in the program's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .command import Program

# Runs this package from its location, then removes it from `sys.modules`: a program may have
# modules of these names. The working directory is not searched in the meantime, so that no module
# of the user's is imported.
BOOT = """
import sys
def begin():
    before = set(sys.modules)
    own = [sys.path.pop(0)] if sys.path[:1] == [""] else []
    import importlib.machinery, importlib.util
    folder, package, fd = sys.argv[1:4]
    spec = importlib.machinery.PathFinder.find_spec(package, [folder])
    if hasattr(spec.loader, "exec_module"):
        sys.modules[package] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:  # of a zip file, before Python 3.10
        spec.loader.load_module(package)
    main = importlib.import_module(package + ".standbymain")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == package:
            del sys.modules[name]
    sys.path[:0] = own
    loaded = set(sys.modules) - before
    return main.worker(int(fd), loaded), main.mainmodule.show_only_the_program
program, shown = begin()
try:
    program()()
except BaseException as error:
    shown(error)
    raise
"""
BOOT_LINE = f"exec(compile({BOOT!r}, '<string>', 'exec'), {{'__name__': 'elasticjob'}})"


def command(wanted: Program, fd: int) -> list[str]:
    """Return the command for the program's interpreter; `fd` is its end of the launcher socket."""
    folder, package = _own_place()
    start = [wanted.interpreter, *wanted.options, "-c", BOOT_LINE]
    return [*start, folder, package, str(fd)]


def _own_place() -> tuple[str, str]:
    """Return the folder or zip file that contains this package, and the package's name."""
    package = Path(__file__).parent
    return str(package.parent), package.name
