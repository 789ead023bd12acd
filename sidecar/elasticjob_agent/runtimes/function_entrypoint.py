"""Function entrypoint: a Python function as a worker, passed to its process through files.

The worker writes its return value to a file, or an error file in the format of torch's `record`.
The folder must be accessible to the agent's user alone, since its content is executed.

Not in `api`: a worker must not import everything that the agent needs.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.context
import multiprocessing.spawn
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from elasticjob_agent.core.worker_environment import ERROR_FILE

PROGRAM = (
    "import sys; sys.path[:0] = sys.argv.pop(1).splitlines(); "
    "from elasticjob_agent.runtimes.function_entrypoint import main; main()"
)
ROUND = "ELASTICJOB_ROUND"
IMPORTED = ("elasticjob_agent", "elasticjob_rendezvous", "elasticjob")


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function and its arguments. `${local_rank}` in a string argument is replaced."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def arguments(self, local_rank: int) -> tuple[Any, ...]:
        return with_local_rank(self.args, local_rank)


def with_local_rank(args: tuple[Any, ...], local_rank: int) -> tuple[Any, ...]:
    """Return the arguments with `${local_rank}` replaced; any other `$` is kept."""
    return tuple(
        arg.replace("${local_rank}", str(local_rank)) if isinstance(arg, str) else arg
        for arg in args
    )


class CallFolder:
    """Folder of a pickled call and its results."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def call(self) -> Path:
        return self.path / "call.pickle"

    def returned(self, number: int, local_rank: int) -> Path:
        """Return the path of one worker's pickled return value in a round.

        In a job, whose nodes share the folder, `local_rank` is the rank.
        """
        return self.path / f"returned-{number}-{local_rank}.pickle"

    def value(self, number: int, local_rank: int) -> Any:
        """Return a worker's return value; None if it did not return, e.g. after `sys.exit(0)`."""
        try:
            return pickle.loads(self.returned(number, local_rank).read_bytes())
        except FileNotFoundError:
            return None

    def write(self, call: FunctionCall, work: Path | None = None) -> tuple[int, ...]:
        """Pickle a call for spawned processes; return the descriptors they must inherit.

        As with multiprocessing's spawn, functions are pickled by name, and arguments may contain
        pipes, queues and locks. A function without a name that a worker can import, such as one of
        a notebook, is pickled by value with cloudpickle. Raises the errors of pickle.

        Args:
            work: working folder of the workers; the default is this process's.
        """
        preparation = multiprocessing.spawn.get_preparation_data("worker")
        if work is not None:
            preparation["dir"] = str(work)
        carrier = _Carrier()
        former = multiprocessing.context.get_spawning_popen()
        multiprocessing.context.set_spawning_popen(carrier)  # type: ignore[arg-type]
        try:
            with self.call.open("wb") as file:
                reduction.dump(preparation, file)
                if is_importable(call.function):
                    reduction.dump(call, file)
                else:
                    file.write(_by_value(call))
        finally:
            multiprocessing.context.set_spawning_popen(former)
        return tuple(carrier.descriptors)

    def command(self) -> tuple[str, ...]:
        """Return the command that runs the call; the caller appends round and local rank."""
        return (sys.executable, "-u", "-c", PROGRAM, "\n".join(_folders()), str(self.path))


def is_importable(function: Callable[..., Any]) -> bool:
    """Return True if a spawned process finds a function by its name.

    It runs the main module again if that is a file or a module, as multiprocessing does.
    """
    while isinstance(function, partial):
        function = function.func
    named = getattr(function, "__func__", function)
    named = named if hasattr(named, "__qualname__") else type(named)
    module = found = sys.modules.get(named.__module__)
    for part in named.__qualname__.split("."):
        found = getattr(found, part, None)
    if getattr(found, "__func__", found) is not named or module is None:
        return False
    is_main = named.__module__ == "__main__"
    has_source = getattr(module, "__spec__", None) or getattr(module, "__file__", None)
    return not is_main or has_source is not None


def _by_value(value: object) -> bytes:
    try:
        import cloudpickle
    except ImportError as error:
        raise pickle.PicklingError(
            "a worker cannot import it, because it is defined in a notebook, inside of a function "
            "or as a lambda: move it into a module, or install cloudpickle"
        ) from error
    pickled: bytes = cloudpickle.dumps(value)
    return pickled


def _folders() -> list[str]:
    """Return the folders of the packages that `PROGRAM` imports, which may be one or several."""
    specs = [find_spec(name) for name in IMPORTED]
    return list(
        dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin)
    )


class _Carrier:
    """Stand-in for multiprocessing's spawn process: records the descriptors to inherit."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        self.descriptors.append(descriptor)
        return descriptor

    class DupFd:
        """Descriptor that has the same number in the worker."""

        def __init__(self, descriptor: int) -> None:
            self._descriptor = descriptor

        def detach(self) -> int:
            return self._descriptor


def main() -> None:
    """Run the call as a worker process that `CallFolder.command` started.

    Without a round and a local rank in the command, as in a job, its value is that of its rank.
    """
    folder, *numbers = sys.argv[1:4]
    number, local_rank = numbers or (os.environ[ROUND], os.environ["RANK"])
    del sys.argv[1:]
    place = CallFolder(Path(folder))
    with place.call.open("rb") as file:
        multiprocessing.spawn.prepare(pickle.load(file))
        call: FunctionCall = pickle.load(file)
    sys.exit(
        run_call(call, place.returned(int(number), int(local_rank)), int(local_rank), os.environ)
    )


def run_call(
    call: FunctionCall, returned: Path, local_rank: int, environ: Mapping[str, str]
) -> int:
    """Call the function, store its return value or error, and return the exit code."""
    try:
        value = call.function(*call.arguments(local_rank))
        draft = returned.with_suffix(".draft")
        # A function that was passed by value may return a class that no other process can import.
        draft.write_bytes(pickle.dumps(value) if is_importable(call.function) else _by_value(value))
        draft.replace(returned)
    except SystemExit as end:
        return _code(end)
    except BaseException as error:
        traceback.print_exc()
        _report(error, environ.get(ERROR_FILE, ""))
        return 1
    return 0


def _code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    sys.stderr.write(f"{end.code}\n")
    return 1


def _report(error: BaseException, path: str) -> None:
    """Write the error file, unless the function wrote one itself."""
    if not path or Path(path).exists():
        return
    extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}))
