"""Public values: specs, failures, events, metrics and stores."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from elasticjob_agent.api import events, metrics
from elasticjob_agent.api.spec import (
    NOT_AVAILABLE,
    ProcessFailure,
    Std,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from elasticjob_agent.core.poll_step import JoinTrouble
from elasticjob_agent.polling import agreement, round_store
from elasticjob_agent.polling.agreement import (
    CHARGED_KEY,
    RESTARTS_KEY,
    AssignedRanks,
    RestartBudget,
    RoleInstanceInfo,
    assign_identical,
    assign_through_store,
    known_ranks,
    ranks_between,
)
from elasticjob_agent.polling.join import join_through_handler
from elasticjob_agent.polling.poll import trouble_of
from elasticjob_agent.runtimes.function_entrypoint import with_local_rank
from elasticjob_agent.worker_output import streams_of
from elasticjob_rendezvous import api
from elasticjob_rendezvous.protocol.records.roster import RankAssignment, Roster
from tests.unit.agent.memory_rendezvous import Gang, MemoryStore


def spec(**options: Any) -> WorkerSpec:
    fields = {"role": "r", "local_world_size": 2, "rdzv_handler": Gang().handler(), **options}
    return WorkerSpec(**{"entrypoint": "/usr/bin/train.sh", **fields})


def test_running_states() -> None:
    running = {state for state in WorkerState if WorkerState.is_running(state)}
    assert running == {WorkerState.HEALTHY, WorkerState.UNHEALTHY}
    assert [state.value for state in WorkerState] == [
        "UNKNOWN", "INIT", "HEALTHY", "UNHEALTHY", "STOPPED", "SUCCEEDED", "FAILED",
    ]  # fmt: skip


def test_entrypoint_names_and_deprecated_field() -> None:
    assert spec().get_entrypoint_name() == "train.sh"
    assert spec(entrypoint=spec).get_entrypoint_name() == "spec"
    with pytest.warns(DeprecationWarning, match="use entrypoint"):
        assert spec(fn=spec, entrypoint=None).entrypoint is spec
    with pytest.raises(ValueError, match="numa_options is not supported"):
        spec(numa_options=1)


def test_text_of_new_group_and_worker() -> None:
    group = WorkerGroup(spec())
    assert (group.state, group.group_rank) == (WorkerState.INIT, None)
    assert [worker.local_rank for worker in group.workers] == [0, 1]
    assert str(Worker(1, 5, 3, 8, 4)) == (
        "local_rank=1,global_rank=5,role_rank=3,world_size=8,role_world_size=4"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", Std.NONE), ("3", Std.ALL), ("0:1,12:2", {0: Std.OUT, 12: Std.ERR})],
)
def test_streams_from_text(text: str, expected: Any) -> None:
    assert Std.from_str(text) == expected


@pytest.mark.parametrize("text", ["", "4", "0:4", "1,2", "a:1"])
def test_invalid_streams(text: str) -> None:
    with pytest.raises(ValueError, match="streams must be"):
        Std.from_str(text)


def test_streams_of_one_rank() -> None:
    assert streams_of(Std.OUT, 7) is Std.OUT
    assert streams_of({7: Std.ERR}, 7) is Std.ERR
    assert streams_of({7: Std.ERR}, 0) is Std.NONE


def test_failure_reads_error_file_of_worker(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    extra = {"py_callstack": "Traceback …", "timestamp": "1700000000"}
    report = {"message": {"message": "ValueError: no", "extraInfo": extra}}
    path.write_text(json.dumps(report))
    failure = ProcessFailure(0, 9, 1, str(path))
    assert (failure.timestamp, failure.error_file_data) == (1700000000, report)
    assert failure.message == report["message"]
    assert len(failure.timestamp_isoformat()) == len("2023-11-14_22:13:20")


@pytest.mark.parametrize("content", ["{", "[]", '{"message": 3}', '{"message": {"message": ""}}'])
def test_unreadable_report_is_none(content: str, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(content)
    failure = ProcessFailure(0, 9, -11, str(path))
    assert (failure.error_file, failure.message) == (
        NOT_AVAILABLE, "process 9 was killed by SIGSEGV",
    )  # fmt: skip
    assert (failure.signal_name(), ProcessFailure(0, 9, 1, "").signal_name()) == (
        "SIGSEGV", NOT_AVAILABLE,
    )  # fmt: skip


def test_events_are_lines_that_parse_again() -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    events.register_handler("values", Keep)
    event = events.Event("began", events.EventSource.AGENT, metadata={"rank": 3, "why": None})
    events.record(event, "values")
    events.record(event)
    assert len(lines) == 1
    again = events.Event.deserialize(lines[0])
    assert again == event
    assert again.timestamp > 1_600_000_000_000
    assert events.Event.deserialize(again) is again
    with pytest.raises(ValueError, match="unknown event destination 'nowhere'"):
        events.record(event, "nowhere")


def test_metrics_go_to_a_handler_that_is_an_empty_list() -> None:
    class Kept(list[metrics.MetricData], metrics.MetricHandler):
        def emit(self, metric_data: metrics.MetricData) -> None:
            self.append(metric_data)

    kept, others = Kept(), Kept()
    metrics.configure(kept, "kept")
    metrics.configure(others)
    try:
        metrics.put_metric("steps", 3, "kept")
        metrics.put_metric("steps", 4, "other")
    finally:
        metrics.configure(metrics.NullMetricHandler(), "kept")
        metrics.configure(metrics.NullMetricHandler())
    assert [each.value for each in kept] == [3]
    assert [each.value for each in others] == [4]


def test_metrics_go_to_their_groups(capsys: pytest.CaptureFixture[str]) -> None:
    metrics.configure(metrics.ConsoleMetricHandler(), "values")
    try:
        metrics.put_metric("steps", 3, "values")
        metrics.put_metric("steps", 4)

        @metrics.prof(group="values")
        def works() -> int:
            return 1

        @metrics.prof(group="values")
        def fails() -> None:
            raise ArithmeticError

        assert works() == 1
        with pytest.raises(ArithmeticError):
            fails()
    finally:
        metrics.configure(metrics.NullMetricHandler(), "values")
    lines = [line.partition("[values]: ")[2] for line in capsys.readouterr().out.splitlines()]
    here = "test_metrics_go_to_their_groups.<locals>"
    assert lines[0] == "steps=3"
    assert lines[1] == f"{here}.works.success=1"
    assert lines[2].startswith(f"{here}.works.duration.ms=")
    assert lines[3] == f"{here}.fails.failure=1"
    assert len(lines) == 5


def at_once(count: int, work: Any) -> list[Any]:
    results: list[Any] = [None] * count

    def run(rank: int) -> None:
        results[rank] = work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_all_ranks_exchange_values() -> None:
    store = MemoryStore()
    got = at_once(3, lambda rank: round_store.synchronize(store, b"of %d" % rank, rank, 3, "data/"))
    assert got == [[b"of 0", b"of 1", b"of 2"]] * 3
    assert store.timeout.total_seconds() == 10, "as it was before"


def test_incomplete_barrier_times_out() -> None:
    store = MemoryStore()
    with pytest.raises(LookupError):
        round_store.barrier(store, 2, "gate", barrier_timeout=0.1)
    assert store.keys() == {"gate/num_members"}
    round_store.barrier(store, 2, "gate", barrier_timeout=0.1)


def test_ranks_in_store_match_torch_byte_for_byte() -> None:
    store = MemoryStore()
    roles = [("trainer", 2), ("reader", 1), ("trainer", 3)]
    infos = [RoleInstanceInfo(role, rank, size) for rank, (role, size) in enumerate(roles)]
    got = at_once(3, lambda rank: assign_through_store(store, infos[rank], 3))
    assert got == [AssignedRanks(0, 6, 0, 5), AssignedRanks(2, 6, 0, 1), AssignedRanks(3, 6, 2, 5)]
    assert store.get("torchelastic/role_info/1") == (
        b'{"role": "reader", "rank": 1, "local_world_size": 1}'
    )
    assert store.get("torchelastic/assigned_ranks/2") == b"[3, 6, 2, 5]"
    assert RoleInstanceInfo.deserialize(infos[2].serialize()) == infos[2]
    assert assign_identical(2, 4, 8) == AssignedRanks(16, 32, 16, 32)


def test_roles_in_order() -> None:
    infos = [RoleInstanceInfo("a", 0, 1), RoleInstanceInfo("b", 1, 2), RoleInstanceInfo("b", 2, 3)]
    assert RoleInstanceInfo.find_role_boundaries(infos, "b") == (1, 2)
    assert RoleInstanceInfo.find_role_boundaries(infos, "c") == (-1, -1)
    assert (
        RoleInstanceInfo.compare(infos[0], infos[1])
        < 0
        < RoleInstanceInfo.compare(infos[2], infos[1])
    )
    assert ranks_between(infos, 1) == (6, [1, 2])
    assert ranks_between(infos, 2, 1, 3) == (5, [2, 3, 4])


def test_newcomer_receives_count_and_one_failure_counts_once() -> None:
    store = MemoryStore()
    veterans, newcomer = (
        [RestartBudget(2, charge=True), RestartBudget(2, charge=True), RestartBudget(2)],
        RestartBudget(),
    )
    for budget in (*veterans, newcomer):
        budget.announce(store)
    for budget in (*veterans, newcomer):
        budget.agree(store)
    assert {budget.total for budget in (*veterans, newcomer)} == {3}
    quiet = MemoryStore()
    fresh = RestartBudget()
    fresh.announce(quiet)
    fresh.agree(quiet)
    assert (fresh.total, quiet.keys()) == (0, frozenset())
    assert store.keys() == {RESTARTS_KEY, CHARGED_KEY}


@pytest.mark.parametrize(
    ("offers", "port"),
    [
        ([(0, 4000), (1, 4001), (2, 0)], 4000),
        ([(0, 0), (1, 4001), (2, 4002)], 0),
        ([(0, 4000), (2, 4002)], 0),
    ],
    ids=["all are ours", "rank 0 serves none", "one is not ours"],
)
def test_workers_use_store_of_rank_0_node_if_all_know_it(
    offers: list[tuple[int, int]], port: int
) -> None:
    store = MemoryStore()
    for group_rank, served in offers:
        agreement.offer_store(store, group_rank, served)
    assert agreement.agreed_store_port(store, 3) == port


def test_rank_assignment_from_old_handlers_and_torch_v3_handlers() -> None:
    class Old:
        roster = Roster(
            3, 4, "10.0.0.1", 29400,
            (
                RankAssignment("a", "a", "", 1, "r", 0, 0, 0, 3),
                RankAssignment("b", "b", "", 2, "r", 1, 1, 1, 3),
            ),
        )  # fmt: skip

        def next_rendezvous(self) -> tuple[Any, int, int]:
            return "store", 1, 2

    job = spec(rdzv_handler=Old())
    place = join_through_handler(job.rdzv_handler)
    assert (place.store, place.group_rank, place.group_world_size, place.master, place.number) == (
        "store", 1, 2, None, 0,
    )  # fmt: skip
    assert known_ranks(job.rdzv_handler, 1, 2) == AssignedRanks(1, 4, 1, 3)
    with pytest.raises(ValueError, match="give the handler slots=2"):
        known_ranks(job.rdzv_handler, 0, 2)
    assert known_ranks(spec().rdzv_handler, 0, 2) is None


@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (api.RendezvousClosedError(), JoinTrouble.CLOSED),
        (api.RendezvousTimeoutError(), JoinTrouble.TIMEOUT),
        (api.RendezvousGracefulExitError(), JoinTrouble.LEFT),
        (api.RendezvousConnectionError(), JoinTrouble.ERROR),
        (api.RendezvousUnsupportedError(), JoinTrouble.UNSUPPORTED),
        (api.RendezvousStateError(), JoinTrouble.ERROR),
        (OSError(), JoinTrouble.ERROR),
        (type("RendezvousClosedError", (Exception,), {})(), JoinTrouble.CLOSED),
    ],
)
def test_errors_keep_torch_names(error: Exception, trouble: JoinTrouble) -> None:
    assert trouble_of(error) is trouble


def test_only_local_rank_is_substituted() -> None:
    args = ("--rank=${local_rank}", "$$HOME ${other}", 3)
    assert with_local_rank(args, 5) == ("--rank=5", "$$HOME ${other}", 3)
