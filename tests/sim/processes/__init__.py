"""Simulated processes: pods, agents, their workers and the operator."""
