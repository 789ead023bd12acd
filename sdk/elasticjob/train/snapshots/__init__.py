"""Snapshots of the training state in memory that outlives the workers, and in storage."""

from __future__ import annotations

from elasticjob.train.snapshots.api import Restored, SnapshotError, Snapshots

__all__ = ["Restored", "SnapshotError", "Snapshots"]
