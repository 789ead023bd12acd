"""Snapshots in the memory of a node: files of parts, buffers, and the copy at a stop."""
