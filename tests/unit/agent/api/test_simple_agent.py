"""`SimpleElasticAgent` over an in-process rendezvous, with simulated workers."""

from __future__ import annotations

import json
import logging
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from elasticjob_agent.api import events, metrics
from elasticjob_agent.api.agent import SimpleElasticAgent
from elasticjob_agent.api.spec import (
    ProcessFailure,
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from elasticjob_agent.worker_runtime import (
    Stopped,
    WorkerRuntime,
    WorkerRuntimeEvent,
    WorkersStuck,
)
from elasticjob_rendezvous.api import RendezvousClosedError, RendezvousTimeoutError
from tests.unit.agent.memory_rendezvous import Gang, MemoryHandler, until


class Believed(SimpleElasticAgent):
    """Agent with simulated workers: the script gives each poll's result, then they are healthy."""

    def __init__(self, spec: WorkerSpec, *script: str, **options: Any) -> None:
        super().__init__(spec, **options)
        self.script = list(script)
        self.calls: list[str] = []
        self.groups: list[tuple[int | None, int | None, list[str]]] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.calls.append("start")
        ranks = [str(worker) for worker in worker_group.workers]
        self.groups.append((worker_group.group_rank, worker_group.group_world_size, ranks))
        return {worker.local_rank: 100 + worker.local_rank for worker in worker_group.workers}

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.calls.append("stop")

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ranks = [worker.global_rank for worker in worker_group.workers]
        match self.script.pop(0) if self.script else "":
            case "succeed":
                return RunResult(WorkerState.SUCCEEDED, {rank: f"of {rank}" for rank in ranks})
            case "fail":
                return RunResult(WorkerState.FAILED, {}, {ranks[0]: ProcessFailure(0, 9, 3, "")})
        return RunResult(WorkerState.HEALTHY)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.calls.append(f"shutdown {death_sig.name}")


def spec(handler: MemoryHandler, **options: Any) -> WorkerSpec:
    options = {"role": "trainer", "local_world_size": 1, "max_restarts": 1, **options}
    return WorkerSpec(
        rdzv_handler=handler, entrypoint="/bin/train.sh", monitor_interval=0.02, **options
    )


class Numbers(metrics.MetricHandler):
    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {}

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.seen.setdefault(metric_data.name, []).append(metric_data.value)


@pytest.fixture
def numbers() -> Iterator[Numbers]:
    handler = Numbers()
    metrics.configure(handler)
    yield handler
    metrics.configure(metrics.NullMetricHandler())


@pytest.fixture
def told() -> list[events.Event]:
    """Return the events recorded at the destination `test`."""
    found: list[events.Event] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(events.Event.deserialize(record.getMessage()))

    events.register_handler("test", Keep)
    return found


def at_once(*agents: Believed) -> list[RunResult | Exception]:
    """Run all agents, each in a thread; return their results or exceptions."""
    results: list[RunResult | Exception | None] = [None] * len(agents)

    def run(index: int) -> None:
        try:
            results[index] = agents[index].run()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(agents))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert None not in results, results
    return [result for result in results if result is not None]


def test_single_agent_runs_to_success(numbers: Numbers, told: list[events.Event]) -> None:
    agent = Believed(
        spec(Gang().handler(), local_world_size=2, event_log_handler="test"),
        "",
        "succeed",
    )
    result = agent.run()
    assert (result.state, result.return_values) == (WorkerState.SUCCEEDED, {0: "of 0", 1: "of 1"})
    assert not result.is_failed()
    assert agent.calls == ["start", "shutdown SIGTERM"]
    group = agent.get_worker_group()
    assert (group.state, group.master_addr, group.master_port) == (
        WorkerState.SUCCEEDED, "127.0.0.1", 29001,
    )  # fmt: skip
    assert [worker.id for worker in group.workers] == [100, 101]
    assert numbers.seen["workers.trainer.run_success_no_retries"] == [1]
    assert numbers.seen["workers.trainer.flakiness"] == [0]
    assert numbers.seen["workers.trainer.remaining_restarts"][-1] == 1
    assert set(numbers.seen["workers.trainer.succeeded"]) == {1}
    for method in ("run", "_rendezvous", "_assign_worker_ranks"):
        assert numbers.seen[f"SimpleElasticAgent.{method}.success"] == [1]
    assert "workers.trainer.init" not in numbers.seen, "there are no workers yet"
    states = [event.metadata["state"] for event in told]
    assert states == [
        "RENDEZVOUS", "ASSIGN_WORKER_RANKS", "START", "START", "SUCCEEDED", "SUCCEEDED",
    ]  # fmt: skip
    last = told[-1]
    assert last.name == "torchelastic.worker.status.SUCCEEDED"
    assert (last.metadata["global_rank"], last.metadata["worker_id"]) == (1, "101")
    assert (last.metadata["rdzv_backend"], last.metadata["run_id"]) == ("memory", "memories")
    assert json.loads(str(last.metadata["metadata"]))["entry_point"] == "train.sh"


def test_failure_within_budget_restarts(numbers: Numbers) -> None:
    agent = Believed(spec(Gang().handler()), "fail", "", "succeed")
    assert agent.run().state is WorkerState.SUCCEEDED
    assert agent.calls == ["start", "stop", "start", "shutdown SIGTERM"]
    assert agent.get_worker_group().round == 2
    assert numbers.seen["workers.trainer.run_success_with_retries"] == [1]
    assert numbers.seen["workers.trainer.flakiness"] == [50]


def test_spent_budget_returns_failures_and_closes(numbers: Numbers) -> None:
    handler = Gang(slow=0.3).handler()
    agent = Believed(spec(handler), "fail", "fail")
    result = agent.run()
    assert "set_closed" in handler.calls, "the others are told before this agent ends"
    assert result.is_failed()
    assert result.failures[0].exitcode == 3
    assert agent.get_worker_group().state is WorkerState.FAILED
    assert numbers.seen["workers.trainer.run_failed_with_retries"] == [1]
    assert numbers.seen["workers.trainer.flakiness"] == [100]


def test_ranks_of_nodes_with_different_roles_and_sizes() -> None:
    gang = Gang(wanted=3)
    agents = [
        Believed(spec(gang.handler(), role=role, local_world_size=size))
        for role, size in (("trainer", 2), ("reader", 1), ("trainer", 1))
    ]
    for agent in agents:
        agent.script = ["", "succeed"]
    assert {getattr(result, "state", result) for result in at_once(*agents)} == {
        WorkerState.SUCCEEDED
    }
    by_rank = {agent.groups[0][0]: agent for agent in agents}
    base = 0
    role_bases = {"trainer": 0, "reader": 0}
    for group_rank in range(3):
        group = by_rank[group_rank].get_worker_group()
        role = group.spec.role
        for worker in group.workers:
            assert worker.global_rank == base + worker.local_rank
            assert worker.role_rank == role_bases[role] + worker.local_rank
            assert worker.world_size == 4
            assert worker.role_world_size == {"trainer": 3, "reader": 1}[role]
        base += len(group.workers)
        role_bases[role] += len(group.workers)
    barrier = "torchelastic/agent/terminal_state"
    expected = {
        *(f"torchelastic/{what}/{rank}" for what in ("role_info", "assigned_ranks")
          for rank in range(3)),
        f"{barrier}/num_members",
        f"{barrier}/last_member",
    }  # fmt: skip
    assert gang.stores[0].keys() == expected, "agents of torch's meet these keys and no others"


def test_newcomer_restarts_others_without_charge() -> None:
    gang = Gang()
    first, second = (Believed(spec(gang.handler())) for _ in range(2))

    def join() -> None:
        until(lambda: first.groups, "the first round")
        gang.wanted = 2
        first.script = second.script = [""] * 10_000
        threading.Thread(target=finish).start()
        second.run()

    def finish() -> None:
        until(lambda: len(first.groups) == 2 and second.groups, "the second round")
        first.script, second.script = ["succeed"], ["succeed"]

    thread = threading.Thread(target=join)
    thread.start()
    result = first.run()
    thread.join(60)
    assert result.state is WorkerState.SUCCEEDED
    assert first.calls == ["start", "stop", "start", "shutdown SIGTERM"]
    assert [group[1] for group in first.groups] == [1, 2]
    assert first._remaining_restarts == 1


def test_all_agents_count_failure_of_one_agent() -> None:
    gang = Gang(wanted=2)
    one, other = (Believed(spec(gang.handler(), max_restarts=3)) for _ in range(2))
    one.script = ["fail", "", "succeed"]
    other.script = [""] * 10_000

    def finish() -> None:
        until(lambda: len(one.groups) == 2 and len(other.groups) == 2, "the second round")
        other.script = ["succeed"]

    threading.Thread(target=finish).start()
    results = at_once(one, other)
    assert [getattr(result, "state", result) for result in results] == [WorkerState.SUCCEEDED] * 2
    assert (one._remaining_restarts, other._remaining_restarts) == (2, 2)
    assert other.calls == ["start", "stop", "start", "shutdown SIGTERM"]


def test_job_failure_ends_other_agents() -> None:
    gang = Gang(wanted=2)
    one, other = (Believed(spec(gang.handler(), max_restarts=0)) for _ in range(2))
    one.script = ["fail"]
    results = at_once(one, other)
    assert [getattr(result, "state", result) for result in results] == [WorkerState.FAILED] * 2


def test_missing_peers_time_out() -> None:
    agent = Believed(spec(Gang(wanted=2).handler(seconds=0.2)))
    with pytest.raises(RendezvousTimeoutError, match=r"nobody came within 0\.2 s"):
        agent.run()
    assert agent.calls == ["shutdown SIGTERM"]


def test_closed_rendezvous() -> None:
    with pytest.raises(RendezvousClosedError, match="the gang is closed"):
        Believed(spec(Gang(closed=True).handler())).run()


def test_leave_request_stops_agent() -> None:
    gang = Gang(wanted=1)
    handler = gang.handler()
    agent = Believed(spec(handler))

    def leave() -> None:
        until(lambda: agent.groups, "the first round")
        agent.leave("a test")

    threading.Thread(target=leave).start()
    result = agent.run()
    assert result.state is WorkerState.STOPPED
    assert agent.calls == ["start", "stop", "shutdown SIGTERM"]
    assert handler.calls == ["next_rendezvous", "leave"]


def test_node_that_leaves_because_of_stuck_workers_returns_no_result() -> None:
    """torch's launcher takes every result without failures for success."""

    class Waiting(Believed):
        def _runtime(self) -> WorkerRuntime:
            runtime = super()._runtime()
            events = runtime.events

            async def with_stuck_workers() -> AsyncIterator[WorkerRuntimeEvent]:
                async for event in events():
                    if isinstance(event, Stopped):
                        yield WorkersStuck(event.round, "process 7 waits")
                    else:
                        yield event

            runtime.events = with_stuck_workers  # type: ignore[method-assign]
            return runtime

    agent = Waiting(spec(Gang(wanted=1).handler()))

    def leave() -> None:
        until(lambda: agent.groups, "the first round")
        agent.leave("a test")

    threading.Thread(target=leave).start()
    with pytest.raises(RuntimeError, match="a test; process 7 waits"):
        agent.run()
    assert agent.get_worker_group().state is WorkerState.UNKNOWN


def test_leave_request_while_waiting_for_peers_stops_agent() -> None:
    handler = Gang(wanted=2).handler(seconds=60)
    agent = Believed(spec(handler))

    def leave() -> None:
        until(lambda: handler.calls, "it waits")
        agent.leave("a test")

    threading.Thread(target=leave).start()
    assert agent.run().state is WorkerState.STOPPED
    assert agent.calls == ["shutdown SIGTERM"]


def test_exception_in_agent_method_is_agent_fault() -> None:
    class Broken(Believed):
        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            raise ArithmeticError("no workers today")

    agent = Broken(spec(Gang().handler()))
    with pytest.raises(RuntimeError, match="no workers today"):
        agent.run()
    assert agent.get_worker_group().state is WorkerState.UNKNOWN


def test_subclass_may_override_invoke_run() -> None:
    """Every step works without `run`, for subclasses that override `_invoke_run`."""

    class Own(Believed):
        def _invoke_run(self, role: str = "default") -> RunResult:
            group = self._worker_group
            self._initialize_workers(group)
            assert group.state is WorkerState.HEALTHY
            self._remaining_restarts -= 1
            self._restart_workers(group)
            result = self._monitor_workers(group)
            self._exit_barrier()
            return result

    agent = Own(spec(Gang().handler()), "succeed")
    assert agent.run().return_values == {0: "of 0"}
    assert agent.calls == ["start", "stop", "start", "shutdown SIGTERM"]
    assert agent._remaining_restarts == 0


def test_old_handler_without_master_address() -> None:
    """The old handler returned a tuple; rank 0 wrote the address of torch's store."""

    class Old(MemoryHandler):
        def next_rendezvous(self) -> Any:
            info = super().next_rendezvous()
            return info.store, info.rank, info.world_size

    gang = Gang(wanted=2)
    agents = [Believed(spec(Old(gang), local_addr="10.0.0.9"), "", "succeed") for _ in range(2)]
    results = at_once(*agents)
    assert [getattr(result, "state", result) for result in results] == [WorkerState.SUCCEEDED] * 2
    masters = {
        (group.master_addr, group.master_port)
        for group in (agent.get_worker_group() for agent in agents)
    }
    ((address, port),) = masters
    assert address == "10.0.0.9"
    assert port is not None
    assert gang.stores[0].get("MASTER_PORT") == str(port).encode()


def test_identical_nodes_skip_store_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_WORKER_IDENTICAL", "1")
    gang = Gang(wanted=2)
    agents = [Believed(spec(gang.handler(), local_world_size=2), "", "succeed") for _ in range(2)]
    results = at_once(*agents)
    assert [getattr(result, "state", result) for result in results] == [WorkerState.SUCCEEDED] * 2
    ranks = {worker.global_rank for agent in agents for worker in agent.get_worker_group().workers}
    assert ranks == {0, 1, 2, 3}
    assert {key.rpartition("/")[0] for key in gang.stores[0].keys()} == {  # noqa: SIM118
        "torchelastic/agent/terminal_state"
    }


def test_failed_exit_barrier_is_only_logged(caplog: pytest.LogCaptureFixture) -> None:
    agent = Believed(spec(Gang(wanted=1).handler()), exit_barrier_timeout=0.1)
    agent._initialize_workers(agent.get_worker_group())
    agent.get_worker_group().group_world_size = 2
    agent._exit_barrier()
    assert "gave up waiting for the other agents" in caplog.text


def test_exit_barrier_timeout_bounds_wait_for_others() -> None:
    gang = Gang(wanted=2)
    done = Believed(spec(gang.handler()), "", "succeed", exit_barrier_timeout=0.5)
    busy = Believed(spec(gang.handler()))
    thread = threading.Thread(target=busy.run)
    thread.start()
    assert done.run().state is WorkerState.SUCCEEDED
    busy.leave("the test is over")
    thread.join(60)
    assert not thread.is_alive()


def test_store_that_ended_with_its_host_is_not_waited_for() -> None:
    gang = Gang(wanted=2)
    done = Believed(spec(gang.handler()), "", "succeed")
    busy = Believed(spec(gang.handler()))
    thread = threading.Thread(target=busy.run)
    thread.start()

    def lose() -> None:
        key = "torchelastic/agent/terminal_state/num_members"
        until(lambda: gang.stores and gang.stores[0].check([key]), "one that is done")
        gang.gone = True

    threading.Thread(target=lose).start()
    assert done.run().state is WorkerState.SUCCEEDED, "long before the barrier's 300 s"
    busy.leave("the test is over")
    thread.join(60)
    assert not thread.is_alive()


def test_done_agent_rejoins_when_another_fails() -> None:
    gang = Gang(wanted=2)
    done = Believed(spec(gang.handler()), "succeed", *[""] * 10_000)
    other = Believed(spec(gang.handler()), *[""] * 10, "fail", *[""] * 10_000)

    def finish() -> None:
        until(lambda: len(done.groups) == 2 and len(other.groups) == 2, "the second round")
        done.script, other.script = ["succeed"], ["succeed"]

    threading.Thread(target=finish).start()
    results = at_once(done, other)
    assert [getattr(result, "state", result) for result in results] == [WorkerState.SUCCEEDED] * 2


def test_agent_outcome_events() -> None:
    agent = Believed(spec(Gang().handler()))
    assert agent.get_event_succeeded().name == "torchelastic.worker.status.SUCCEEDED"
    try:
        raise ArithmeticError("no")
    except ArithmeticError:
        failed = agent.get_event_failed()
    assert failed.source is events.EventSource.AGENT
    assert "ArithmeticError: no" in str(failed.metadata["raw_error"])
