"""Operator process: leader election, the active replica, health endpoints."""
