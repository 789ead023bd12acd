"""State, transitions and delays of the etcd v2 rendezvous. No I/O."""
