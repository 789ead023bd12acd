"""Command `elasticjob explain`: the state of a job and its reasons, here or on a cluster."""

from __future__ import annotations

from elasticjob_cli.commands.cluster_reader import ClusterReader, Explanation
from elasticjob_cli.commands.options import Name, Place, placed
from elasticjob_cli.commands.tables import wrapped
from elasticjob_cli.local.job_store import RUNNER_GONE, find_job
from elasticjob_cli.local.stored_job import read_job
from elasticjob_cli.output import show, terminal_width
from elasticjob_operator.domain.explain.explanation import explanation
from elasticjob_operator.domain.explain.phrases import sentence, stop_texts
from elasticjob_operator.domain.plan.lifecycle import SUSPENSION
from elasticjob_operator.model import ElasticJob, Phase
from elasticjob_rendezvous.protocol.text import one_line

INTERRUPTED = (
    "Stopped before its end, by `elasticjob suspend`, Ctrl-C or a signal: `elasticjob run` starts "
    "it again, and a script that keeps checkpoints goes on from the last."
)
JUST_BEGUN = "The job has just started: it has no status yet."


@placed
def explain(
    place: Place,
    name: Name,
) -> None:
    """Explain the state of a job, its reasons, and the remedy.

    Shows missing nodes and their obstacles, the last interruption and its cost, and the failure.
    A job on a cluster is read with kubectl.

    \b
    Examples:
      elasticjob explain digits
      elasticjob explain digits --cluster -n team-a
    """
    if place.kubectl is not None:
        _print(ClusterReader.of(place.kubectl).explain(name))
        return
    folder = find_job(place.namespace, name)
    running = folder.running()  # before the read, so that a runner's last write is not missed
    _print(Explanation(local_explanation(read_job(folder), running)))


def is_runner_gone(found: ElasticJob, running: bool) -> bool:
    """Return True if the runner of a local job ended before the job did."""
    return found.status.phase is Phase.INTERRUPTED or (not running and found.status.phase is None)


def local_explanation(found: ElasticJob, running: bool) -> tuple[str, ...]:
    """Explain a local job from its runner's last status, or that the runner is gone."""
    if found.status.phase in SUSPENSION:
        return (INTERRUPTED, *map(sentence, stop_texts(found.status)))
    if found.status.phase is None:
        return (JUST_BEGUN,) if running else (RUNNER_GONE,)
    sentences = tuple(found.status.explanation) or explanation(found, ())
    return (RUNNER_GONE, *sentences) if is_runner_gone(found, running) else sentences


def _print(explained: Explanation) -> None:
    width = terminal_width()
    lines = list(explained.sentences)
    if explained.events:
        lines += ["", "The newest events:", *(f"  {event}" for event in explained.events)]
    for line in lines:
        show(*wrapped(one_line(line), width, indent=4 if line.startswith(" ") else 0))
