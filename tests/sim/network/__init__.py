"""Simulated network: reachability of hosts, and links between agents."""
