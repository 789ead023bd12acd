"""`LocalElasticAgent` with real processes, over a rendezvous in this process."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

from elasticjob_agent.api import (
    DefaultLogsSpecs,
    LocalElasticAgent,
    RunResult,
    SignalException,
    Std,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from tests.integration.agent_api import functions
from tests.integration.launcher_rig import PROCESS_TAG, alive, process_tag
from tests.paths import ROOT
from tests.unit.agent.memory_rendezvous import Gang, MemoryHandler, until

__all__ = ["process_tag"]


# Not fork: other tests of this process have left gRPC threads in it, which break after a fork.
METHODS = pytest.mark.parametrize("method", ["spawn", "forkserver"])
pytestmark = pytest.mark.usefixtures("process_tag")


def spec(entrypoint: Any, *args: Any, **options: Any) -> WorkerSpec:
    handler = options.pop("handler", None) or Gang().handler()
    options = {"local_world_size": 2, "max_restarts": 1, **options}
    return WorkerSpec(
        role="trainer",
        rdzv_handler=handler,
        entrypoint=entrypoint,
        args=args,
        monitor_interval=0.05,
        **options,
    )


SLEEPS = """#!{python}
import ctypes, time
ctypes.CDLL(None).vfork()  # the parent is in uninterruptible sleep until the child ends
time.sleep(600)
"""


@pytest.mark.parametrize("way", ["argument", "variable", "steps"])
def test_worker_stuck_in_kernel_ends_run_without_restart(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "sleeps"
    script.write_text(SLEEPS.format(python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", "0.3")
    seconds = 0.3 if way == "argument" else None
    agent = LocalElasticAgent(
        spec(str(script), local_world_size=1),
        DefaultLogsSpecs(str(tmp_path)),
        uninterruptible_state_timeout=seconds,
    )
    group = agent.get_worker_group()
    if way == "steps":
        agent._initialize_workers(group)
        until(lambda: agent._monitor_workers(group).state == "UNHEALTHY", "the worker to be stuck")
        agent._shutdown(timeout=0)
    else:
        result = agent.run()
        assert (result.state, group.state) == (WorkerState.UNHEALTHY, WorkerState.FAILED)
        assert not result.is_failed()
        assert group.round == 1
    assert agent._remaining_restarts == 0
    assert not Path(f"/proc/{group.workers[0].id}").exists()


@pytest.mark.parametrize(
    ("given", "variable", "expected"),
    [(None, "", 0), (None, "5", 5), (None, "soon", 0), (None, "-1", 0), (3, "5", 3), (-3, "5", 0)],
)
def test_time_in_kernel_is_configured_as_in_torch(
    given: float | None, variable: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.agent.server import local_elastic_agent as torchs

    monkeypatch.setenv("TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT", variable)
    agent = LocalElasticAgent(spec("true"), uninterruptible_state_timeout=given)
    assert agent._sleepers.timeout_seconds == expected
    assert torchs._resolve_uninterruptible_state_timeout(given) == expected


def test_agent_runs_inside_a_running_event_loop() -> None:
    agent = LocalElasticAgent(spec(functions.exits, 0))

    async def run_in_notebook() -> RunResult:
        return agent.run()

    assert asyncio.run(run_in_notebook()).state == WorkerState.SUCCEEDED


@METHODS
def test_function_entrypoint_returns_values(
    method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = DefaultLogsSpecs(str(tmp_path), redirects=Std.ERR, tee=Std.OUT)
    agent = LocalElasticAgent(
        spec(functions.environment, "hello", "${local_rank}"), logs, start_method=method
    )
    result = agent.run()
    assert (result.state, set(result.return_values)) == (WorkerState.SUCCEEDED, {0, 1})
    for rank, env in result.return_values.items():
        assert env["pid"] != os.getpid()
        assert (env["word"], env["local_rank"]) == ("hello", str(rank))
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "MASTER_PORT")
        assert [env[name] for name in names] == [str(rank), str(rank), "2", "0", "trainer", "29001"]
        assert env["TORCHELASTIC_RUN_ID"] == "memories"
        assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[trainer0]:hello of 0", "[trainer1]:hello of 1"]
    assert "complaint" not in err, "standard error goes to files alone"
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("memories_")
    assert (folder / "round_1/1/stdout.log").read_text() == "hello of 1\n"
    assert (folder / "round_1/1/stderr.log").read_text() == "complaint of 1\n"


@METHODS
def test_failed_function_restarts_whole_group(method: str, tmp_path: Path) -> None:
    agent = LocalElasticAgent(spec(functions.fail_first, str(tmp_path)), start_method=method)
    result = agent.run()
    assert result.return_values == {0: "round 2", 1: "round 2"}
    assert not alive(int((tmp_path / "ran-1-0").read_text()))
    assert agent._remaining_restarts == 0


@METHODS
def test_exhausted_restart_budget_reports_failure(method: str, tmp_path: Path) -> None:
    logs = DefaultLogsSpecs(str(tmp_path))
    job = spec(functions.always_fails, max_restarts=0, local_world_size=1)
    result = LocalElasticAgent(job, logs, start_method=method).run()
    assert result.is_failed()
    failure = result.failures[0]
    assert (failure.local_rank, failure.exitcode) == (0, 1)
    assert failure.message["message"] == "ArithmeticError: the loss is not a number"
    assert "in always_fails" in failure.message["extraInfo"]["py_callstack"]
    assert Path(failure.error_file).parts[-3:] == ("round_1", "0", "error.json")


def test_worker_in_another_folder_reports_to_a_relative_log_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = """cd / && echo '{"message": "told"}' > "$TORCHELASTIC_ERROR_FILE"; exit 3"""
    job = spec("sh", "-c", report, max_restarts=0, local_world_size=1)
    failure = LocalElasticAgent(job, DefaultLogsSpecs("logs")).run().failures[0]
    assert (failure.exitcode, failure.message) == (3, "told")
    assert Path(failure.error_file).is_relative_to(tmp_path / "logs")


@METHODS
def test_function_entrypoint_reports_exit_or_signal(method: str) -> None:
    ended = LocalElasticAgent(spec(functions.exits, 0), start_method=method).run()
    assert (ended.state, ended.return_values) == (WorkerState.SUCCEEDED, {0: None, 1: None})
    job = spec(functions.exits, 7, max_restarts=0, local_world_size=1)
    failed = LocalElasticAgent(job, start_method=method).run()
    assert failed.failures[0].exitcode == 7
    job = spec(functions.unpicklable, max_restarts=0, local_world_size=1)
    failed = LocalElasticAgent(job, start_method=method).run()
    assert "pickle" in str(failed.failures[0].message)
    job = spec(functions.fails_without_text, max_restarts=0, local_world_size=1)
    failed = LocalElasticAgent(job, start_method=method).run()
    message = failed.failures[0].message
    assert message["message"] == "TextlessError: <exception str() failed>"
    assert "in fails_without_text" in message["extraInfo"]["py_callstack"]


FORKED = """
from elasticjob_agent.api import LocalElasticAgent, WorkerSpec
from tests.unit.agent.memory_rendezvous import Gang

{work}

spec = WorkerSpec(
    role="trainer", rdzv_handler=Gang().handler(), entrypoint=work, local_world_size=2,
    max_restarts=0, monitor_interval=0.05,
)
print(LocalElasticAgent(spec, start_method="fork").run().return_values)
"""
INHERITS = """
secret = object()
here = id(secret)

def work():
    return id(secret) == here
"""
COLLECTS = """
import gc

class Owned:
    def __del__(self):
        freed.append(self)

freed = []
gc.disable()
garbage = Owned()
garbage.itself = garbage
del garbage

def work():
    gc.collect()
    return len(freed)
"""
LEAVES_THREAD = """
import atexit, multiprocessing, pathlib, signal, tempfile, threading

folder = tempfile.TemporaryDirectory()
others = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
others.start()

def write():
    threading.main_thread().join()
    pathlib.Path(folder.name, str(threading.get_native_id())).touch()

def work():
    threading.Thread(target=write).start()
    return len(multiprocessing.active_children())

def check():
    print(len(list(pathlib.Path(folder.name).iterdir())), others.is_alive())
    others.terminate()

atexit.register(check)
"""


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        pytest.param(INHERITS, "{0: True, 1: True}\n", id="it has the memory of its parent"),
        pytest.param(COLLECTS, "{0: 0, 1: 0}\n", id="it frees no object of its parent"),
        pytest.param(LEAVES_THREAD, "{0: 0, 1: 0}\n2 True\n", id="it waits for its own threads"),
    ],
)
def test_forked_worker_begins_and_ends_as_one_of_multiprocessing(work: str, expected: str) -> None:
    """The test runs in a process of its own, without gRPC threads."""
    program = FORKED.format(work=work)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == expected, done.stderr


@METHODS
def test_queues_reach_workers(
    method: str, monkeypatch: pytest.MonkeyPatch, process_tag: str
) -> None:
    monkeypatch.delenv(PROCESS_TAG)
    resource_tracker.ensure_running()  # multiprocessing's own process, which stays
    monkeypatch.setenv(PROCESS_TAG, process_tag)
    queue = multiprocessing.get_context(method).SimpleQueue()
    result = LocalElasticAgent(spec(functions.puts, queue), start_method=method).run()
    assert result.state is WorkerState.SUCCEEDED, result
    assert {queue.get(), queue.get()} == {"from 0", "from 1"}
    queue.close()


def test_program_entrypoint_receives_arguments(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os, sys; print('rank', os.environ['RANK'], *sys.argv[1:])"
    job = spec(sys.executable, "-c", code, "--shard=${local_rank}")
    result = LocalElasticAgent(job, log_line_prefix_template="<${rank}> ").run()
    assert (result.state, result.return_values) == (WorkerState.SUCCEEDED, {0: None, 1: None})
    out, _ = capfd.readouterr()
    assert sorted(out.splitlines()) == ["<0> rank 0 --shard=0", "<1> rank 1 --shard=1"]


class OwnSteps(LocalElasticAgent):
    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return super()._start_workers(worker_group)


@pytest.mark.parametrize("agent", [LocalElasticAgent, OwnSteps])
def test_no_worker_hosts_the_store_of_a_handler_that_hosts_it(
    agent: type[LocalElasticAgent], capfd: pytest.CaptureFixture[str]
) -> None:
    class Hosting(MemoryHandler):
        use_agent_store = True

    code = "import os; print(os.environ['TORCHELASTIC_USE_AGENT_STORE'])"
    job = spec(sys.executable, "-c", code, handler=Hosting(Gang()), local_world_size=1)
    assert agent(job).run().state is WorkerState.SUCCEEDED
    assert capfd.readouterr().out == "True\n"


def test_killed_program_reports_signal() -> None:
    job = spec("sh", "-c", "kill -9 $$", max_restarts=0, local_world_size=1)
    failure = LocalElasticAgent(job).run().failures[0]
    assert (failure.exitcode, failure.signal_name()) == (-9, "SIGKILL")


def test_output_filter_shows_selected_ranks_only(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    logs = DefaultLogsSpecs(str(tmp_path), tee=Std.ALL, local_ranks_filter={1})
    LocalElasticAgent(spec(functions.environment, "hello", "${local_rank}"), logs).run()
    out, _ = capfd.readouterr()
    assert out == "[trainer1]:hello of 1\n"
    assert len(list(tmp_path.glob("*/round_1/0/stdout.log"))) == 1


def test_device_affinity_gives_one_device_per_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 6")
    job = spec(functions.environment, "", "", virtual_local_rank=True)
    values = LocalElasticAgent(job).run().return_values
    assert [values[rank]["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == ["4", "6"]
    assert [values[rank]["LOCAL_RANK"] for rank in (0, 1)] == ["0", "0"]
    with pytest.raises(ValueError, match="has no device for local rank 2"):
        LocalElasticAgent(
            spec(functions.environment, "", "", virtual_local_rank=True, local_world_size=3)
        )


def test_two_agents_recover_lost_worker_and_admit_newcomer(tmp_path: Path) -> None:
    gang = Gang(wanted=2)
    jobs = [
        spec(functions.waits, str(tmp_path), handler=gang.handler(), local_world_size=1)
        for _ in range(3)
    ]
    results: dict[int, RunResult] = {}

    def run(index: int) -> None:
        results[index] = LocalElasticAgent(jobs[index], exit_barrier_timeout=10).run()

    def ran(number: int, world: int) -> list[Path]:
        paths = [tmp_path / f"ran-{number}-{rank}-of-{world}" for rank in range(world)]
        until(lambda: all(p.exists() for p in paths), f"round {number}")
        return paths

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads[:2]:
        thread.start()
    os.kill(json.loads(ran(1, 2)[1].read_text())["pid"], signal.SIGKILL)
    ran(2, 2)
    gang.wanted = 3
    threads[2].start()
    ran(3, 3)
    (tmp_path / "finish").touch()
    for thread in threads:
        thread.join(60)
    assert {result.state for result in results.values()} == {WorkerState.SUCCEEDED}
    assert len(results) == 3


def test_signal_stops_workers_and_leaves_rendezvous(tmp_path: Path) -> None:
    """The test runs in a process of its own: only a main thread handles signals."""
    handler = Gang().handler()
    agent = LocalElasticAgent(spec(functions.waits, str(tmp_path), handler=handler))

    def interrupt() -> None:
        until(lambda: (tmp_path / "ran-1-1-of-2").exists(), "the worker")
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SignalException, match="SIGTERM") as raised:
        agent.run()
    thread.join(60)
    assert raised.value.sigval is signal.SIGTERM
    assert handler.calls == ["next_rendezvous", "leave"]
    assert not alive(json.loads((tmp_path / "ran-1-1-of-2").read_text())["pid"])


@METHODS
def test_overridden_run_loop_uses_same_worker_runtime(method: str, tmp_path: Path) -> None:
    class Own(LocalElasticAgent):
        def _invoke_run(self, role: str = "default") -> RunResult:
            group = self._worker_group
            self._initialize_workers(group)
            pids = [worker.id for worker in group.workers]
            until(lambda: self._monitor_workers(group).state is WorkerState.FAILED, "the failure")
            failed = self._monitor_workers(group)
            assert "the loss is not a number" in str(failed.failures[1].message)
            self._restart_workers(group)
            assert not any(alive(pid) for pid in pids)
            until(lambda: self._monitor_workers(group).state is WorkerState.SUCCEEDED, "the end")
            self._exit_barrier()
            return self._monitor_workers(group)

    result = Own(spec(functions.fail_first, str(tmp_path)), start_method=method).run()
    assert result.return_values == {0: "round 2", 1: "round 2"}


def test_run_calls_overridden_steps(tmp_path: Path) -> None:
    class Own(LocalElasticAgent):
        started = 0

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            self.started += 1
            return super()._start_workers(worker_group)

    agent = Own(spec(functions.fail_first, str(tmp_path)))
    assert agent.run().return_values == {0: "round 2", 1: "round 2"}
    assert agent.started == 2


def test_invalid_agent_arguments_are_refused() -> None:
    handler: MemoryHandler = Gang().handler()
    with pytest.raises(ValueError, match="start_method must be one of"):
        LocalElasticAgent(spec("true"), start_method="thread")
    for wrong, says in (
        ({"local_world_size": 0}, "local_world_size"),
        ({"monitor_interval": 0.0}, "monitor_interval"),
        ({"max_restarts": -1}, "max_restarts"),
        ({"entrypoint": None}, "entrypoint"),
    ):
        fields = {"role": "r", "local_world_size": 1, "rdzv_handler": handler, "entrypoint": "x"}
        with pytest.raises(ValueError, match=says):
            WorkerSpec(**{**fields, **wrong})  # type: ignore[arg-type]
