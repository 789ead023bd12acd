"""Snapshots in storage that all nodes share."""
