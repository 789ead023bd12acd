"""Refusal of the API server to delete pods, such as by a policy, a webhook or a role."""

from __future__ import annotations

from collections.abc import Iterator

from elasticjob_operator.domain.explain.phrases import listed, quoted
from elasticjob_operator.domain.observed.state import MAX_REFUSAL, Observed
from elasticjob_operator.model.refusals import MAX_REFUSED, DeletionRefusal
from elasticjob_operator.model.status import Status
from elasticjob_rendezvous.protocol.records.roster import natural_order
from elasticjob_rendezvous.protocol.text import printable, shortened

REFUSED = "DeletionRefused"
"""Reason of condition Suspended while the API server refuses to delete pods."""
REMEDY = "let the webhook, policy or role admit the operator's deletions of pods"


def deletion_refusal(observed: Observed) -> DeletionRefusal | None:
    """Return the refusal to delete pods that are still there; None without one."""
    kept = {
        pod.name: observed.undeletable[pod.uid]
        for pod in observed.pods
        if pod.uid in observed.undeletable and not pod.terminating
    }
    if not kept:
        return None
    names = sorted(kept, key=natural_order)
    message = shortened(printable(kept[names[0]]), MAX_REFUSAL)
    return DeletionRefusal(pods=names[:MAX_REFUSED], count=len(names), message=message)


def refusal_text(refusal: DeletionRefusal) -> str:
    """Return the fact and its cause."""
    more = refusal.count - len(refusal.pods)
    names = listed([*refusal.pods, *([f"{more} more"] if more > 0 else [])])
    return f"the API server refuses to delete {names}: {refusal.message}"


def deletion_sentences(status: Status) -> Iterator[str]:
    """Yield the refusal to delete pods and its remedy."""
    if (refusal := status.deletion_refusal) is not None:
        shown = refusal.model_copy(update={"message": quoted(refusal.message)})
        text = refusal_text(shown)
        yield text[:1].upper() + text[1:]
        yield REMEDY[:1].upper() + REMEDY[1:]
