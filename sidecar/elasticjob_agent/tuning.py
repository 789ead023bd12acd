"""What an agent of torch's backends may be told beside its job's bounds: torch's own settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """None is the backend's own default.

    Args:
        connect_seconds: how long what keeps the rendezvous is waited for at the start; None: for
            as long as for a round.
        read_seconds: one answer of etcd; of c10d, a key of the rendezvous' store.
        etcd_prefix: the folder of all runs in etcd.
        beat_seconds: between two signs of life in a c10d rendezvous.
        beats: so many may be missed.
        heartbeat_seconds: what one of them may take.
        close_seconds: what leaving or closing a c10d rendezvous may take.
    """

    connect_seconds: float | None = None
    read_seconds: int | None = None
    etcd_prefix: str | None = None
    beat_seconds: int | None = None
    beats: int | None = None
    heartbeat_seconds: float | None = None
    close_seconds: float | None = None


UNTUNED = Tuning()
