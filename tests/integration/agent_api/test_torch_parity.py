"""Identical assertions on torch's elastic classes and on ElasticJob's."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic import rendezvous as torch_rendezvous
from torch.distributed.elastic.agent.server import api as torch_agent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs as TorchLogs
from torch.distributed.elastic.multiprocessing import SignalException as TorchSignal
from torch.distributed.elastic.multiprocessing import Std as TorchStd
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure as TorchFailure
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo as TorchInfo
from torch.distributed.elastic.utils import store as torch_store

from elasticjob_agent import api as our_agent
from elasticjob_agent.api.agent import SimpleElasticAgent
from elasticjob_agent.polling import round_store
from elasticjob_agent.worker_output import streams_of
from elasticjob_rendezvous import api as our_rendezvous

AGENTS = [pytest.param(torch_agent, id="torch"), pytest.param(our_agent, id="ours")]
STORES = [pytest.param(torch_store, id="torch"), pytest.param(round_store, id="ours")]
INFOS = [
    pytest.param(TorchInfo, id="torch"),
    pytest.param(our_rendezvous.RendezvousStoreInfo, id="ours"),
]
PARAMETERS = [
    pytest.param(torch_rendezvous.RendezvousParameters, id="torch"),
    pytest.param(our_rendezvous.RendezvousParameters, id="ours"),
]
SECONDS = 60.0


class Handler:
    """Rendezvous of one node; `info` returns the answer of each round."""

    use_agent_store = False

    def __init__(self, info: Callable[[], Any]) -> None:
        self._info = info

    def next_rendezvous(self) -> Any:
        return self._info()

    def get_backend(self) -> str:
        return "alone"

    def get_run_id(self) -> str:
        return "parity"

    def num_nodes_waiting(self) -> int:
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return

    def shutdown(self) -> bool:
        return True


def alone(master: bool = True) -> Any:
    """Return a round of one node, with a new store."""
    info = SimpleNamespace(master_addr="127.0.0.1", master_port=29400) if master else None
    store = HashStore()
    return SimpleNamespace(store=store, rank=0, world_size=1, bootstrap_store_info=info)


def spec(of: Any, **options: Any) -> Any:
    return of.WorkerSpec(
        **{
            "role": "trainer",
            "local_world_size": 1,
            "rdzv_handler": Handler(alone),
            "entrypoint": "/bin/true",
            "monitor_interval": 0.02,
            "max_restarts": 1,
            **options,
        }
    )


def believed(of: Any, answers: list[Any], **options: Any) -> Any:
    """Run an agent whose `_monitor_workers` gives these answers; return it and its shutdowns."""

    class Believed(of.SimpleElasticAgent):
        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            return {0: 100}

        def _stop_workers(self, worker_group: Any) -> None:
            return

        def _monitor_workers(self, worker_group: Any) -> Any:
            return answers.pop(0)

        def _shutdown(self, death_sig: Any = signal.SIGTERM, timeout: int = 30) -> None:
            self.ended = (death_sig, timeout)

    return Believed(spec(of, **options), exit_barrier_timeout=SECONDS)


@pytest.mark.parametrize("of", AGENTS)
def test_result_compares_state_by_value(of: Any) -> None:
    assert of.RunResult("FAILED").is_failed()
    assert of.RunResult(torch_agent.WorkerState.FAILED).is_failed()
    assert of.RunResult(our_agent.WorkerState.FAILED).is_failed()
    assert not of.RunResult("SUCCEEDED").is_failed()
    assert not of.RunResult({}, {}).is_failed()


@pytest.mark.parametrize("of", AGENTS)
def test_states_equal_those_of_the_other_package(of: Any) -> None:
    for ours, torchs in zip(our_agent.WorkerState, torch_agent.WorkerState, strict=True):
        assert ours == torchs == ours.value
        assert {ours} == {torchs}
        running = of.WorkerState.is_running
        assert running(ours) is running(torchs) is (ours.value in ("HEALTHY", "UNHEALTHY"))


@pytest.mark.parametrize("of", AGENTS)
@pytest.mark.parametrize("kind", [torch_agent.WorkerState, our_agent.WorkerState])
def test_subclass_can_return_results_of_either_package(of: Any, kind: Any) -> None:
    from_of = torch_agent if kind is torch_agent.WorkerState else our_agent
    failure = TorchFailure(0, 9, 3, "<none>")
    agent = believed(
        of,
        [
            from_of.RunResult(kind.HEALTHY),
            from_of.RunResult(kind.FAILED, {}, {0: failure}),
            from_of.RunResult(kind.SUCCEEDED, {0: "value"}),
        ],
    )
    result = agent.run()
    assert (result.state, result.return_values) == ("SUCCEEDED", {0: "value"})
    assert not result.is_failed()
    assert agent.get_worker_group().state == "SUCCEEDED"
    assert agent._remaining_restarts == 0
    assert agent.ended == (signal.SIGTERM, 30)


@pytest.mark.parametrize("of", AGENTS)
def test_failed_torch_result_ends_run_without_restart_budget(of: Any) -> None:
    failed = torch_agent.RunResult(
        torch_agent.WorkerState.FAILED, {}, {0: TorchFailure(0, 9, 3, "<none>")}
    )
    agent = believed(of, [failed], max_restarts=0)
    result = agent.run()
    assert result.is_failed()
    assert result.failures[0].exitcode == 3


@pytest.mark.parametrize("of", AGENTS)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_in_overridden_loop_reaches_shutdown(of: Any, signum: signal.Signals) -> None:
    agent = believed(of, [])
    error = TorchSignal("told to end", sigval=signum)

    def stopped(role: str = "default") -> Any:
        raise error

    agent._invoke_run = stopped
    with pytest.raises(TorchSignal):
        agent.run()
    assert agent.ended == (signum, 30)


@pytest.mark.parametrize("of", AGENTS)
def test_graceful_exit_in_overridden_loop_is_not_an_error(of: Any) -> None:
    agent = believed(of, [])

    def left(role: str = "default") -> Any:
        raise torch_rendezvous.RendezvousGracefulExitError

    agent._invoke_run = left
    result = agent.run()
    assert result is None or result.state == "STOPPED"


def test_shutdown_without_signal_and_timeout_parameters_is_called() -> None:
    class Old(SimpleElasticAgent):
        _start_workers = _stop_workers = _monitor_workers = None  # type: ignore[assignment]
        ended = 0

        def _invoke_run(self, role: str = "default") -> our_agent.RunResult:
            return our_agent.RunResult(our_agent.WorkerState.SUCCEEDED)

        def _shutdown(self) -> None:  # type: ignore[override]
            self.ended += 1

    agent = Old(spec(our_agent))
    agent.run()
    assert agent.ended == 1


class Little:
    """Store that can only set and get."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:
        self._values[key] = value

    def get(self, key: str) -> bytes:
        return self._values[key]


@pytest.mark.parametrize("of", INFOS)
@pytest.mark.parametrize("port", [None, 29401])
def test_bootstrap_info_needs_store_with_set_and_get_only(of: Any, port: int | None) -> None:
    store = Little()
    first = of.build(0, store, "10.0.0.1", port)
    second = of.build(rank=1, store=store, local_addr=None)
    assert (second.master_addr, second.master_port) == (first.master_addr, first.master_port)
    assert first.master_addr == "10.0.0.1"
    assert port is None or first.master_port == port
    assert store.get("MASTER_ADDR") == b"10.0.0.1"
    assert store.get("MASTER_PORT") == str(first.master_port).encode()


@pytest.mark.parametrize("of", PARAMETERS)
def test_config_values_are_parsed_as_in_torch(of: Any) -> None:
    settings = of("c10d", "host", "run", 1, 1, a=" 4 ", b=True, c=-3, d="+10", e="yEs", f=None, g=0)
    numbers = [settings.get_as_int(name) for name in "abcdf"]
    assert numbers == [4, 1, -3, 10, None]
    assert [settings.get_as_bool(name) for name in "befg"] == [True, True, None, False]
    for name in "ad":
        with pytest.raises(ValueError, match=name):
            settings.get_as_bool(name)
    for name in "e":
        with pytest.raises(ValueError, match=name):
            settings.get_as_int(name)


def at_once(works: list[Callable[[], Any]]) -> list[Any]:
    """Return each function's result, or the exception that it raised."""

    def caught(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(caught, works))


@pytest.mark.parametrize("of", STORES)
def test_current_barrier_accepts_keyword_and_positional_arguments(of: Any) -> None:
    store = HashStore()
    of.barrier(store, 1, "a", 5)
    of.barrier(store=store, world_size=1, key_prefix="b", barrier_timeout=5, rank=0)
    of.barrier(store, 1, "c", 5, 0, str, 1)
    both = at_once([lambda: of.barrier(store, 2, key_prefix="d")] * 2)
    assert both == [None, None]
    assert store.check([f"{prefix}/last_member" for prefix in "abcd"])
    assert store.timeout == timedelta(seconds=300)


def test_previous_barrier_takes_rank_before_world_size() -> None:
    store = HashStore()

    def arrive(rank: int) -> Callable[[], Any]:
        return lambda: round_store.barrier(store, rank, 2, key_prefix="a", barrier_timeout=5)

    assert at_once([arrive(0), arrive(1)]) == [None, None]
    round_store.barrier(store, 0, 1, "b", 5)
    round_store.barrier(store, rank=0, world_size=1, key_prefix="c", barrier_timeout=5)
    assert store.check([f"{prefix}/last_member" for prefix in "abc"])


@pytest.mark.parametrize("of", STORES)
def test_barrier_error_names_missing_ranks(of: Any) -> None:
    store = HashStore()

    def arrive(rank: int) -> Callable[[], Any]:
        return lambda: of.barrier(
            store,
            4,
            "gate",
            barrier_timeout=1,
            rank=rank,
            rank_tracing_decoder=lambda number: f"host-{number}",
            trace_timeout=0.05,
        )

    first, second = (str(error) for error in at_once([arrive(0), arrive(1)]))
    assert "missing_ranks=[" in first
    assert "host-2" in first
    assert "host-3" in first
    assert "host-1" not in first
    assert "check rank 0 (host-0) for missing rank info" in second


@pytest.mark.parametrize("of", STORES)
def test_barrier_without_rank_raises_store_error(of: Any) -> None:
    with pytest.raises(RuntimeError) as caught:
        of.barrier(HashStore(), 2, "gate", barrier_timeout=0.1)
    assert "missing_ranks" not in str(caught.value)


def test_torch_std_values_are_accepted() -> None:
    assert streams_of(TorchStd.ALL, 0) is our_agent.Std.ALL
    assert streams_of({1: TorchStd.ERR}, 1) is our_agent.Std.ERR


def test_missing_master_address_is_an_error() -> None:
    agent = believed(our_agent, [])
    group = agent.get_worker_group()
    agent._rendezvous(group)
    assert (group.master_addr, group.master_port) == ("127.0.0.1", 29400)
    group.store.set_timeout(timedelta(seconds=0.2))
    for store in (group.store, None):
        with pytest.raises(our_rendezvous.RendezvousTimeoutError, match="bootstrap_store_info"):
            agent._get_master_addr_port(store)


@pytest.mark.parametrize("where", [("10.0.0.7", 29411), (None, None)])
def test_master_address_written_by_rank_0_is_found(where: tuple[Any, Any]) -> None:
    store = HashStore()
    SimpleElasticAgent._set_master_addr_port(store, *where, "10.0.0.8")
    address, port = SimpleElasticAgent._get_master_addr_port(store)
    assert address == (where[0] or "10.0.0.8")
    assert port == where[1] or port > 0
    assert SimpleElasticAgent._get_master_addr_port(Both(store)) == (address, port)


class Both:
    """`Little`, over another store."""

    def __init__(self, store: Any) -> None:
        self.set, self.get = store.set, store.get


def test_previous_handler_publishes_master_address_in_store() -> None:
    rounds = itertools.count(1)

    def answer() -> Any:
        next(rounds)
        return HashStore(), 0, 1

    agent = believed(our_agent, [], rdzv_handler=Handler(answer), master_port=29412)
    agent._rendezvous(agent.get_worker_group())
    assert agent.get_worker_group().master_port == 29412


def test_signal_during_exit_barrier_is_raised() -> None:
    for of in (torch_agent, our_agent):
        agent = believed(of, [])
        group = agent.get_worker_group()
        agent._rendezvous(group)
        agent._store = group.store = SimpleNamespace(
            timeout=timedelta(seconds=1), set_timeout=print, add=lambda *_: 2, wait=_told_to_end
        )
        with pytest.raises(TorchSignal):
            agent._exit_barrier()


def _told_to_end(*_: Any) -> None:
    raise TorchSignal("told to end", sigval=signal.SIGTERM)


def test_torch_worker_specs_are_accepted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "says"
    script.write_text("#!/bin/sh\necho out; echo err >&2\n")
    script.chmod(0o755)
    logs = tmp_path / "logs"
    agent = our_agent.LocalElasticAgent(
        spec(torch_agent, entrypoint=str(script)),
        TorchLogs(str(logs), redirects=TorchStd.ERR, tee=TorchStd.OUT),
    )
    assert agent.run().state == torch_agent.WorkerState.SUCCEEDED
    (kept,) = logs.rglob("stderr.log")
    assert kept.read_text() == "err\n"
    assert capfd.readouterr().out == "[trainer0]:out\n"
    bare = our_agent.LocalElasticAgent(spec(torch_agent, entrypoint=str(script)))
    assert not bare.run().is_failed()


BAD_PARAMETERS = [("", 1, 1), (None, 1, 1), ("c10d", 0, 1), ("c10d", -1, 1), ("c10d", 2, 1)]


@pytest.mark.parametrize("of", PARAMETERS)
@pytest.mark.parametrize(("backend", "low", "high"), BAD_PARAMETERS)
def test_invalid_parameters_raise_value_error(of: Any, backend: Any, low: int, high: int) -> None:
    with pytest.raises(ValueError, match=r"backend|nodes"):
        of(backend, "host", "run", low, high)


@pytest.mark.parametrize("of", AGENTS)
def test_result_for_unknown_worker_raises_value_error(of: Any) -> None:
    agent = believed(of, [])
    (worker,) = agent.get_worker_group().workers
    with pytest.raises(ValueError, match="-1"):
        agent._get_worker_state(worker, of.RunResult(of.WorkerState.SUCCEEDED, {5: None}))
    assert agent._get_worker_state(worker, of.RunResult(of.WorkerState.FAILED)) == "TERMINATED"
