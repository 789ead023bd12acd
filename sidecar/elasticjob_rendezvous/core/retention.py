"""Retention in etcd: deletion of old rounds, and of failures beyond the number kept. Pure."""

from __future__ import annotations

from itertools import islice

from elasticjob_rendezvous.core import verdicts
from elasticjob_rendezvous.core.acts import DELETES_PER_TXN, Act, Scene, held
from elasticjob_rendezvous.core.kv import Delete, Txn
from elasticjob_rendezvous.core.view import View

KEPT_ROUNDS = 10


def outdated(view: View, number: int) -> list[Delete]:
    """Return the deletions of rounds too old to be kept once round `number` is sealed."""
    keys, last = view.keys, number - KEPT_ROUNDS
    return [
        *(Delete(keys.roster(old)) for old in view.rosters if old <= last),
        *(Delete(keys.history(old)) for old in view.histories if old <= last),
        *(Delete(keys.failures(old), prefix=True) for old in view.failures if old <= last),
        *(Delete(keys.dones(old), prefix=True) for old in view.dones if old <= last),
    ]


def surplus(view: View) -> tuple[Delete, ...]:
    """Return the deletions of failures beyond those kept per round, as many as one write holds."""
    found = (
        Delete(view.keys.failure(number, member))
        for number, failures in view.failures.items()
        for member in verdicts.surplus(failures)
    )
    return tuple(islice(found, DELETES_PER_TXN))


def clear_surplus(scene: Scene) -> Act | None:
    """Delete the surplus, some at a time."""
    deletes = surplus(scene.view)
    if not deletes:
        return None
    note = f"{len(deletes)} failures deleted: over the limit per round"
    return Act(Txn((held(scene.own),), deletes, ()), note)
