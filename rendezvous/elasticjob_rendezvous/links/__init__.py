"""Links between the agents of one job: failure detection in milliseconds, besides etcd's leases."""
