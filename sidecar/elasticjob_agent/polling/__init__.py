"""Rendezvous that an agent polls: etcd-v2, c10d, and any handler of torch's API."""
