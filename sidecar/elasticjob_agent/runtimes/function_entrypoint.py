"""Function entrypoint: a Python function as a worker, passed to its process through files.

The worker runs a generated program, which defines what the call refers to, then makes the call. The
program states its imports and search path as literals, so that a zygote can preload the modules.
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
import sysconfig
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from keyword import iskeyword
from multiprocessing import reduction
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, BinaryIO, NoReturn

from elasticjob_agent.core.worker_environment import ERROR_FILE

PROGRAM = """\
# Worker of a function job: define the function's module, then call the function.
import sys

sys.path[:0] = {first!r}
sys.path += {last!r}

import runpy

from elasticjob_agent.runtimes import function_entrypoint

call = function_entrypoint.prepared(__file__)
{definitions}
call.run()
"""
_DEFINE = "function_entrypoint.define_main(runpy.{runner}({target!r}, run_name={name!r}{more}))"
MAIN = "__mp_main__"
"""Name under which a worker runs the main module of the submitting process, as spawn names it."""
ROUND = "ELASTICJOB_ROUND"
IMPORTED = ("elasticjob_agent", "elasticjob_rendezvous", "elasticjob")


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """Function and its arguments. `${local_rank}` in a string argument is replaced."""

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

    @property
    def program(self) -> Path:
        """Path of the program that runs the call."""
        return self.path / "function_job.py"

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
        main = _main_definition(preparation)
        if work is not None:
            preparation["dir"] = str(work)
        recorder = _DescriptorRecorder()
        former = multiprocessing.context.get_spawning_popen()
        multiprocessing.context.set_spawning_popen(recorder)  # type: ignore[arg-type]
        try:
            with self.call.open("wb") as file:
                reduction.dump(preparation, file)
                by_name = is_importable(call.function)
                modules = _dump(call, file) if by_name else _dump_by_value(call, file)
        finally:
            multiprocessing.context.set_spawning_popen(former)
        definitions = [*main, *(f"import {name}" for name in modules)]
        first, last = _search_path()
        program = PROGRAM.format(first=first, last=last, definitions="\n".join(definitions))
        self.program.write_text(program, "utf-8")
        return tuple(recorder.descriptors)

    def command(self) -> tuple[str, ...]:
        """Return the command that runs the call; the caller appends round and local rank."""
        return (sys.executable, "-u", str(self.program))


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


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError as error:
        raise pickle.PicklingError(
            "a worker cannot import it, because it is defined in a notebook, inside of a function "
            "or as a lambda: move it into a module, or install cloudpickle"
        ) from error
    return cloudpickle


def _dump(value: object, file: BinaryIO) -> Sequence[str]:
    """Pickle a value for a spawned process; return the modules that it refers to."""
    found = _References(())

    class Pickler(reduction.ForkingPickler):
        def reducer_override(self, value: Any) -> Any:
            found.add(value)
            return NotImplemented

    Pickler(file).dump(value)
    return list(found.modules)


def _dump_by_value(value: object, file: BinaryIO) -> Sequence[str]:
    """Pickle a value with cloudpickle; return the modules that it refers to."""
    cloudpickle = _cloudpickle()
    found = _References(cloudpickle.list_registry_pickle_by_value())
    base: Any = cloudpickle.Pickler

    class Pickler(base):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            found.add(value)
            return super().reducer_override(value)

    Pickler(file).dump(value)
    return list(found.modules)


class _References:
    """Modules that a pickle refers to by name, in order: loading it imports them.

    `by_value` are modules, each with its parts, of which cloudpickle stores the contents.
    """

    def __init__(self, by_value: Collection[str]) -> None:
        self.modules: dict[str, None] = {}
        self._left_out = frozenset({"__main__", MAIN, "builtins", *by_value})

    def add(self, value: Any) -> None:
        """Add the module of a value that pickle stores by its name."""
        if isinstance(value, ModuleType):
            name = value.__name__ if sys.modules.get(value.__name__) is value else ""
        elif isinstance(value, (type, FunctionType, BuiltinFunctionType)):
            name = (value.__module__ or "") if is_importable(value) else ""
        else:
            return
        parts = name.split(".")
        packages = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
        words = all(part.isidentifier() and not iskeyword(part) for part in parts)
        if words and name in sys.modules and not packages & self._left_out:
            self.modules[name] = None


def _main_definition(preparation: dict[str, Any]) -> list[str]:
    """Remove the main module from the data of spawn; return the statement that defines it.

    As with spawn, a package's `__main__` and IPython's script are not run again.
    """
    name = preparation.pop("init_main_from_name", None)
    path = preparation.pop("init_main_from_path", None)
    if name is not None and name.rpartition(".")[2] != "__main__":
        more = ", alter_sys=True"
        return [_DEFINE.format(runner="run_module", target=name, name=MAIN, more=more)]
    if path is not None and Path(path).stem != "ipython":
        return [_DEFINE.format(runner="run_path", target=path, name=MAIN, more="")]
    return []


def _search_path() -> tuple[list[str], list[str]]:
    """Return the folders before and after Python's own of this process's search path.

    The worker's own search path lacks them until it has this process's; the zygote keeps them.
    """
    own = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    folders = [str(Path(folder).absolute()) for folder in sys.path]
    begin = next((at for at, folder in enumerate(folders) if folder in own), len(folders))
    added = [not folder.startswith(own) or folder.endswith("-packages") for folder in folders]
    zipped = f"python{sys.version_info[0]}{sys.version_info[1]}.zip"
    first = [folder for folder in folders[:begin] if Path(folder).name != zipped]
    last = [folder for folder, kept in zip(folders[begin:], added[begin:], strict=True) if kept]
    return first, list(dict.fromkeys([*last, *_folders()]))


def _folders() -> list[str]:
    """Return the folders of our packages that the program imports, one or several."""
    specs = [find_spec(name) for name in IMPORTED]
    return list(
        dict.fromkeys(str(Path(spec.origin).parents[1]) for spec in specs if spec and spec.origin)
    )


class _DescriptorRecorder:
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


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """Call of a worker whose interpreter is prepared, at its place."""

    place: CallFolder
    position: int
    number: int
    local_rank: int

    def run(self) -> NoReturn:
        """Load the call, make it, and end the process."""
        with self.place.call.open("rb") as file:
            file.seek(self.position)
            call: FunctionCall = pickle.load(file)
        returned = self.place.returned(self.number, self.local_rank)
        sys.exit(run_call(call, returned, self.local_rank, os.environ))


def prepared(program: str) -> PreparedCall:
    """Give this worker the search path, folder and arguments of the submitting process.

    Without a round and a local rank in the command, as in a job, its value is that of its rank.
    A process that the function spawns must not run the generated program again as its main module.
    """
    vars(sys.modules["__main__"]).pop("__file__", None)
    numbers = sys.argv[1:3]
    number, local_rank = numbers or (os.environ[ROUND], os.environ["RANK"])
    place = CallFolder(Path(program).absolute().parent)
    with place.call.open("rb") as file:
        multiprocessing.spawn.prepare(pickle.load(file))
        position = file.tell()
    return PreparedCall(place, position, int(number), int(local_rank))


_former_main: list[ModuleType] = []


def define_main(content: Mapping[str, Any]) -> None:
    """Make the names of a module that has been run those of the main module."""
    _former_main.append(sys.modules["__main__"])  # the program's own names must stay
    module = ModuleType(MAIN)
    module.__dict__.update(content)
    sys.modules["__main__"] = sys.modules[MAIN] = module


def run_call(
    call: FunctionCall, returned: Path, local_rank: int, environ: Mapping[str, str]
) -> int:
    """Call the function, store its return value or error, and return the exit code."""
    try:
        value = call.function(*call.arguments(local_rank))
        draft = returned.with_suffix(".draft")
        # A function that was passed by value may return a class that no other process can import.
        draft.write_bytes(
            pickle.dumps(value) if is_importable(call.function) else _cloudpickle().dumps(value)
        )
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
    message = {"message": f"{type(error).__name__}: {_text(error)}", "extraInfo": extra}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}))


def _text(error: BaseException) -> str:
    """Return the text of an exception; traceback's words if the exception gives none."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"
