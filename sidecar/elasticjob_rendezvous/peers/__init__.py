"""Connections between the agents of one job: liveness in milliseconds, beside etcd's leases."""
