"""Event and metric emitter of an agent, with torch's names."""

from __future__ import annotations

import json
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from elasticjob_agent.api.events import NOWHERE, Event, EventSource, record
from elasticjob_agent.api.metrics import put_metric
from elasticjob_agent.api.spec import RunResult, Worker, WorkerGroup, WorkerState


class EventEmitter:
    """Part of an agent that emits events and metrics."""

    def __init__(self, worker_group: WorkerGroup) -> None:
        self._worker_group = worker_group
        self._remaining_restarts = worker_group.spec.max_restarts
        self._total_execution_time = 0

    def get_event_failed(self) -> Event:
        """Create the event that the agent failed, with the traceback of the current exception."""
        return self._construct_event("FAILED", EventSource.AGENT, raw_error=traceback.format_exc())

    def get_event_succeeded(self) -> Event:
        return self._construct_event("SUCCEEDED", EventSource.AGENT)

    @contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        """Record an event with the duration of the block in milliseconds."""
        began = time.perf_counter()
        try:
            yield
        finally:
            took_ms = (time.perf_counter() - began) * 1000
            self._record_event(state, EventSource.AGENT, duration_ms=took_ms)

    def _record_event(self, state: str, source: EventSource, *about: Any, **facts: Any) -> None:
        """Construct and record an event, unless events are dropped."""
        destination = self._worker_group.spec.event_log_handler
        if destination != NOWHERE:
            record(self._construct_event(state, source, *about, **facts), destination)

    def _record_worker_events(self, result: RunResult) -> None:
        if result.state == WorkerState.SUCCEEDED and not result.return_values:
            return  # the other nodes finished while this one had no workers
        for worker in self._worker_group.workers:
            failure = result.failures.get(worker.global_rank)
            self._record_event(
                self._get_worker_state(worker, result),
                EventSource.WORKER,
                worker,
                raw_error=None if failure is None else json.dumps(failure.error_file_data),
                exit_code=None if failure is None else failure.exitcode,
                worker_pid=None if failure is None else failure.pid,
            )

    def _get_worker_state(self, worker: Worker, result: RunResult) -> str:
        """Return the worker's final state; TERMINATED if the agent ended it."""
        if worker.global_rank in result.failures:
            return WorkerState(result.state).value
        ended_by_agent = (WorkerState.UNHEALTHY, WorkerState.FAILED, WorkerState.STOPPED)
        if result.state in ended_by_agent:
            return "TERMINATED"
        if worker.global_rank in result.return_values:
            return WorkerState(result.state).value
        raise ValueError(f"the result has no entry for the worker of rank {worker.global_rank}")

    def _construct_event(
        self,
        state: str,
        source: EventSource,
        worker: Worker | None = None,
        raw_error: str | None = None,
        duration_ms: float | None = None,
        exit_code: int | None = None,
        worker_pid: int | None = None,
    ) -> Event:
        group, spec = self._worker_group, self._worker_group.spec
        details: dict[str, object] = {
            "group_world_size": group.group_world_size,
            "entry_point": spec.get_entrypoint_name(),
        }
        if worker is not None:
            # Lists of one element, as readers of torch's events expect.
            details["local_rank"] = [worker.local_rank]
            details["role_rank"] = [worker.role_rank]
            details["role_world_size"] = [worker.role_world_size]
            details["exit_code"] = [exit_code]
            details["worker_pid"] = [worker_pid]
        return Event(
            f"torchelastic.worker.status.{state}",
            source,
            metadata={
                "run_id": spec.rdzv_handler.get_run_id(),
                "global_rank": None if worker is None else worker.global_rank,
                "group_rank": group.group_rank,
                "worker_id": None if worker is None else str(worker.id),
                "role": spec.role,
                "hostname": _get_fq_hostname(),
                "state": state,
                "total_run_time": self._total_execution_time,
                "rdzv_backend": spec.rdzv_handler.get_backend(),
                "raw_error": raw_error,
                "metadata": json.dumps(details),
                "agent_restarts": self._restarts,
                "duration_ms": duration_ms,
            },
        )

    @property
    def _restarts(self) -> int:
        return self._worker_group.spec.max_restarts - self._remaining_restarts

    def _record_metrics(self, group_results: RunResult) -> None:
        failed, retried = group_results.is_failed(), self._restarts > 0
        self._record_flakiness_metric(failed)
        self._put("run_total", 1)
        self._record_metric_with_condition("run_success_with_retries", not failed and retried)
        self._record_metric_with_condition("run_success_no_retries", not failed and not retried)
        self._record_metric_with_condition("run_failed_with_retries", failed and retried)
        self._record_metric_with_condition("run_failed_no_retries", failed and not retried)

    def _record_metric_with_condition(self, metric_name: str, condition: bool) -> None:
        self._put(metric_name, int(condition))

    def _record_flakiness_metric(self, is_failed: bool = False) -> None:
        """Emit the used share of the restart budget in percent; 100 for a failed run."""
        budget = self._worker_group.spec.max_restarts + 1
        spent = budget if is_failed else budget - (self._remaining_restarts + 1)
        self._put("flakiness", int(100 * spent / budget))

    def _record_progress(self) -> None:
        """Emit the metrics of the monitor loop, every `monitor_interval` once there are workers."""
        state = WorkerState(self._worker_group.state)
        if state is WorkerState.INIT:
            return
        self._put("remaining_restarts", self._remaining_restarts)
        self._put(state.name.lower(), 1)

    def _put(self, name: str, value: int) -> None:
        put_metric(f"workers.{self._worker_group.spec.role}.{name}", value)


@lru_cache(maxsize=1)
def _get_fq_hostname() -> str:
    """Return the fully qualified host name, cached: a slow name server would delay the agent."""
    return socket.getfqdn(socket.gethostname())
