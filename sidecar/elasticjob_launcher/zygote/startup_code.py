"""Effects of the code that Python runs at each start: `sitecustomize`, `usercustomize`, .pth files.

In the zygote it has run before its effects could be observed, and a fork does not run it. A child
process therefore runs it once more, observed.
"""

from __future__ import annotations

import os
import site
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from elasticjob_launcher.zygote.fork_safety import thread_count
from elasticjob_launcher.zygote.identifiers import TRUSTED
from elasticjob_launcher.zygote.preload import ImportGuard
from elasticjob_launcher.zygote.search_path import is_python_module

CUSTOM = ("sitecustomize", "usercustomize")
_UNKNOWN = "start-up code (sitecustomize, .pth files)"
_MOST_BYTES = 4096


def startup_refusal(own: Iterable[str]) -> str:
    """Return the reason against sharing the effects of that code; empty if there is none.

    `own` are the modules imported for the zygote itself.
    """
    if sys.flags.no_site or thread_count() > 1:
        return ""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        _run_again(theirs, own)
    os.close(theirs)
    with open(ours, "rb") as answer:  # noqa: PTH123
        text = answer.read()
    os.waitpid(child, 0)
    return text.decode(errors="replace")


def _run_again(answer: int, own: Iterable[str]) -> NoReturn:
    """Run the code in this child process, write the reason to `answer`, and exit."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        again = _reloadable(own)
        for name in again:
            del sys.modules[name]
        guard = ImportGuard((), [*CUSTOM, *again], startup=True)
        with guard.watching():
            guard.run("", site.main)
        guard.effects.clean_up()
        if guard.refusals:
            name = max(guard.refusals)  # empty if the module is not known
            what, reason = name or _UNKNOWN, guard.refusals[name]
            text = f"{what} runs at every start of Python, not in a fork: {reason}"
            os.write(answer, text.encode()[:_MOST_BYTES])
    finally:
        os._exit(0)


def _reloadable(own: Iterable[str]) -> list[str]:
    """Return the loaded modules that this code has imported and can import again.

    Extension modules and their packages cannot be loaded twice.
    """
    there: dict[str, Any] = {
        name: module
        for name, module in sys.modules.items()
        if name not in own and name != "__main__" and not is_python_module(name)
    }
    tops = {name.partition(".")[0] for name, module in there.items() if not _is_source(module)}
    return [name for name in there if name.partition(".")[0] not in {*tops, *TRUSTED}]


def _is_source(module: Any) -> bool:
    """Return True for a module in Python, and for a package without code."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return origin is None or origin.endswith(".py")
