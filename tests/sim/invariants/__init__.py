"""Invariants of the simulation, each checked against the ground truth."""
