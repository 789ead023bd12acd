"""Decisions about snapshots, and the records that the ranks exchange for them. No I/O."""
