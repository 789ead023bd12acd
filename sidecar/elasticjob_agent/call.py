"""A function as a worker: how it is handed over, run, and what it leaves.

It leaves what it returned in a file, or an error file as torch's `record` writes it. The
folder is the agent's own and nobody else's: what lies there is executed.

Not in `api`: a worker must not import all that the agent needs.
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
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from elasticjob_agent.core.ranks import ERROR_FILE

PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv.pop(1)); "
    "from elasticjob_agent.call import main; main()"
)
PACKAGES = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Call:
    """A function and its arguments. `${local_rank}` in a text argument is filled in."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def arguments(self, local_rank: int) -> tuple[Any, ...]:
        return with_local_rank(self.args, local_rank)


def with_local_rank(args: tuple[Any, ...], local_rank: int) -> tuple[Any, ...]:
    """The arguments of one worker. Any other `$` is the argument's own."""
    return tuple(
        arg.replace("${local_rank}", str(local_rank)) if isinstance(arg, str) else arg
        for arg in args
    )


class CallFolder:
    """Where a call is handed over and its results are left."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def call(self) -> Path:
        return self.path / "call.pickle"

    def returned(self, number: int, local_rank: int) -> Path:
        """What one worker of a round returned."""
        return self.path / f"returned-{number}-{local_rank}.pickle"

    def value(self, number: int, local_rank: int) -> Any:
        """What it returned; None where it ended otherwise, as by `sys.exit(0)`."""
        try:
            return pickle.loads(self.returned(number, local_rank).read_bytes())
        except FileNotFoundError:
            return None

    def write(self, call: Call) -> tuple[int, ...]:
        """Hand a call over to processes that share nothing; the descriptors they must inherit.

        As with multiprocessing's spawn: functions by their name, and pipes, queues and locks
        among the arguments. Raises what pickle raises.
        """
        carrier = _Carrier()
        former = multiprocessing.context.get_spawning_popen()
        multiprocessing.context.set_spawning_popen(carrier)  # type: ignore[arg-type]
        try:
            with self.call.open("wb") as file:
                reduction.dump(multiprocessing.spawn.get_preparation_data("worker"), file)
                reduction.dump(call, file)
        finally:
            multiprocessing.context.set_spawning_popen(former)
        return tuple(carrier.descriptors)

    def command(self) -> tuple[str, ...]:
        """The program that runs the call, but for the round and the local rank."""
        return (sys.executable, "-u", "-c", PROGRAM, str(PACKAGES), str(self.path))


class _Carrier:
    """Stands in for the process that multiprocessing would start: it notes descriptors."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, descriptor: int) -> int:
        self.descriptors.append(descriptor)
        return descriptor

    class DupFd:
        """A descriptor that the worker has under the same number."""

        def __init__(self, descriptor: int) -> None:
            self._descriptor = descriptor

        def detach(self) -> int:
            return self._descriptor


def main() -> None:
    """A worker that `CallFolder.command` started."""
    folder, number, local_rank = sys.argv[1:4]
    del sys.argv[1:]
    place = CallFolder(Path(folder))
    with place.call.open("rb") as file:
        multiprocessing.spawn.prepare(pickle.load(file))
        call: Call = pickle.load(file)
    sys.exit(run(call, place.returned(int(number), int(local_rank)), int(local_rank), os.environ))


def run(call: Call, returned: Path, local_rank: int, environ: Mapping[str, str]) -> int:
    """Call the function; the exit code."""
    try:
        value = call.function(*call.arguments(local_rank))
        draft = returned.with_suffix(".draft")
        draft.write_bytes(pickle.dumps(value))
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
    """The error file, unless the function wrote one itself."""
    if not path or Path(path).exists():
        return
    extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(time.time()))}
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": message}))
