"""Backend options of etcd-v2 and c10d beside the job's bounds: torch's own settings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Backend options; None selects the backend's default.

    Args:
        connect_seconds: maximum wait for the rendezvous store at the start; None: the join
            timeout.
        read_seconds: timeout of one read, of etcd or of a key in the c10d store.
        etcd_prefix: folder of all runs in etcd.
        beat_seconds: heartbeat interval of a c10d rendezvous.
        beats: missed heartbeats after which a node is lost.
        heartbeat_seconds: timeout of one heartbeat.
        close_seconds: timeout of leaving or closing a c10d rendezvous.
    """

    connect_seconds: float | None = None
    read_seconds: int | None = None
    etcd_prefix: str | None = None
    beat_seconds: int | None = None
    beats: int | None = None
    heartbeat_seconds: float | None = None
    close_seconds: float | None = None


UNTUNED = Tuning()
