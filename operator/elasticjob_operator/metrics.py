"""Prometheus metrics of the operator, in their own registry."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from elasticjob_operator.domain.status.rounds import RECOVERY, parts_ms, recovery_ms
from elasticjob_operator.model import Phase
from elasticjob_operator.model.status import Interruptions, RoundStatus, Status
from elasticjob_operator.reconcile.workqueue import Retry

_RECOVERY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_PASS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_LAG_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30)


class Metrics:
    """All metrics of one process and the methods that update them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._phases: Callable[[], Iterable[str]] = lambda: ()
        self._goodput: Callable[[], Iterable[tuple[str, str, int]]] = lambda: ()
        self.rounds = Counter(
            "elasticjob_rounds", "Rounds that became final.", ["cause"], registry=self.registry
        )
        self.restarts = Counter(
            "elasticjob_restarts", "Failures charged to a job's budget.", registry=self.registry
        )
        self.interruptions = Counter(
            "elasticjob_interruptions",
            "Rounds that ended without a charged restart: losses, leaves, preemptions, joins and "
            "others.",
            ["kind"],
            registry=self.registry,
        )
        self.stops = Counter(
            "elasticjob_stops",
            "Planned stops of jobs, by the result of the checkpoint before them, as in the status.",
            ["result"],
            registry=self.registry,
        )
        self.recovery = Histogram(
            "elasticjob_recovery_seconds",
            "Cost of a round by part: detect, stop, backoff, join, confirm, start; total is their "
            "sum, as in the status (without detect for join and scaleDown, when training went "
            "on); first_step follows the total, if workers report their steps.",
            ["part", "cause"],
            buckets=_RECOVERY_BUCKETS,
            registry=self.registry,
        )
        self.starts = Counter(
            "elasticjob_node_starts",
            "Nodes whose workers were started for a round, warm or cold, with warm start enabled.",
            ["start"],
            registry=self.registry,
        )
        self.reconcile = Histogram(
            "elasticjob_reconcile_seconds",
            "Duration of one reconcile of a job, including its actions.",
            buckets=_PASS_BUCKETS,
            registry=self.registry,
        )
        self.status_lag = Histogram(
            "elasticjob_status_lag_seconds",
            "Delay from a change in etcd to the status that shows it.",
            buckets=_LAG_BUCKETS,
            registry=self.registry,
        )
        self.errors = Counter(
            "elasticjob_errors", "Failed reconciles.", ["kind"], registry=self.registry
        )
        self.status_writes = Counter(
            "elasticjob_status_writes", "Statuses written.", registry=self.registry
        )
        self.pods_created = Counter(
            "elasticjob_pods_created", "Pods created.", registry=self.registry
        )
        self.pods_deleted = Counter(
            "elasticjob_pods_deleted", "Pods deleted.", ["reason"], registry=self.registry
        )
        self.queue_depth = Gauge(
            "elasticjob_queue_depth", "Jobs waiting to be reconciled.", registry=self.registry
        )
        self.unknown_access = Gauge(
            "elasticjob_etcd_unknown_access",
            "Users, roles and grants in etcd at the last check that belong to no job.",
            registry=self.registry,
        )
        self.leader = Gauge("elasticjob_leader", "1 on the active replica.", registry=self.registry)
        self.registry.register(_JobsByPhase(lambda: self._phases()))
        self.registry.register(_Goodput(lambda: self._goodput()))

    def count_jobs(self, phases: Callable[[], Iterable[str]]) -> None:
        """Set the callback that yields the phase of every job when the gauge is collected."""
        self._phases = phases

    def show_goodput(self, goodput: Callable[[], Iterable[tuple[str, str, int]]]) -> None:
        """Set the callback that yields namespace, name and goodput of jobs when it is collected."""
        self._goodput = goodput

    def count_error(self, error: Exception) -> None:
        """Count a failed reconcile by the error's `kind`, else by the type of its cause."""
        kind = error.kind if isinstance(error, Retry) else ""
        self.errors.labels(kind or type(error.__cause__ or error).__name__).inc()

    def observe_round(self, found: RoundStatus) -> None:
        """Count a round whose cost will not change any more, except for its first step."""
        self.rounds.labels(found.cause).inc()
        known = {part: ms for part, ms in parts_ms(found).items() if part in RECOVERY}
        for part, ms in known.items():
            self.recovery.labels(part, found.cause).observe(ms / 1000)
        if (spent := recovery_ms(found)) is not None:
            self.recovery.labels("total", found.cause).observe(spent / 1000)
        if found.cold_nodes is not None:
            self.starts.labels("cold").inc(found.cold_nodes)
            self.starts.labels("warm").inc(max(0, found.nodes - found.cold_nodes))

    def observe_first_step(self, found: RoundStatus) -> None:
        """Count the first step of a round, known only after the rest of its cost."""
        if found.first_step_ms is not None:
            self.recovery.labels("first_step", found.cause).observe(found.first_step_ms / 1000)

    def observe_counts(self, before: Status, after: Status) -> None:
        """Count the increases of a status's counters; those of a resumed job restart at 0."""
        self.restarts.inc(max(0, after.restarts - before.restarts))
        old, new = before.interruptions or Interruptions(), after.interruptions or Interruptions()
        for kind in Interruptions.model_fields:
            more = getattr(new, kind) - getattr(old, kind)
            if more > 0:
                self.interruptions.labels(kind).inc(more)
        if after.last_stop is not None and after.last_stop != before.last_stop:
            self.stops.labels(after.last_stop.result).inc()

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)


class _JobsByPhase(Collector):
    def __init__(self, phases: Callable[[], Iterable[str]]) -> None:
        self._phases = phases

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily("elasticjob_jobs", "Jobs by phase.", labels=["phase"])
        found = Tally(self._phases())
        for phase in Phase:
            family.add_metric([phase.value], found[phase.value])
        yield family


class _Goodput(Collector):
    def __init__(self, goodput: Callable[[], Iterable[tuple[str, str, int]]]) -> None:
        self._goodput = goodput

    def collect(self) -> Iterable[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "elasticjob_goodput_percent",
            "Goodput of each unfinished job whose script takes snapshots, as in the status.",
            labels=["job_namespace", "job_name"],
        )
        for namespace, name, percent in self._goodput():
            family.add_metric([namespace, name], percent)
        yield family
