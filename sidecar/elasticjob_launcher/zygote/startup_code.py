"""Effects of the code that Python runs at each start: `sitecustomize`, `usercustomize`, .pth files.

In the zygote it has run before its effects could be observed, and a fork does not run it. A child
process therefore runs it once more, observed.
"""

from __future__ import annotations

import os
import signal
import site
import sys
import time
from collections.abc import Iterable
from typing import Any, NoReturn

from elasticjob_launcher.zygote.effects.identifiers import TRUSTED
from elasticjob_launcher.zygote.fork_safety import thread_count
from elasticjob_launcher.zygote.preload import ImportGuard
from elasticjob_launcher.zygote.search_path import is_python_module

CUSTOM = ("sitecustomize", "usercustomize")
_UNKNOWN = "start-up code (sitecustomize, .pth files)"
_MOST_BYTES = 4096
_SECONDS = 60.0
_POLL_SECONDS = 0.005


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
    os.set_blocking(ours, False)  # a process that this code has started may keep the pipe open
    failure = _awaited(child)
    try:
        text = os.read(ours, _MOST_BYTES).decode(errors="replace")
    except BlockingIOError:
        text = ""
    os.close(ours)
    return text or (failure and _because(_UNKNOWN, failure))


def _awaited(child: int) -> str:
    """Wait for the child's end; return a reason unless it has run all of the code."""
    deadline = time.monotonic() + _SECONDS
    ended, status = os.waitpid(child, os.WNOHANG)
    while not ended:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"run again, it has not ended within {_SECONDS:g} s"
        time.sleep(_POLL_SECONDS)
        ended, status = os.waitpid(child, os.WNOHANG)
    return f"run again, it ended the process (wait status {status})" if status else ""


def _because(what: str, reason: str) -> str:
    return f"{what} runs at every start of Python, not in a fork: {reason}"


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
            os.write(answer, _because(what, reason).encode()[:_MOST_BYTES])
        os._exit(0)
    except BaseException as error:
        text = _because(_UNKNOWN, f"run again, it failed: {type(error).__name__}: {error}")
        os.write(answer, text.encode()[:_MOST_BYTES])
    finally:
        os._exit(1)


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
