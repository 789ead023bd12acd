"""Simulated etcd, and the requests and watches of an agent."""
