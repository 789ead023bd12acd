"""The pure part of the etcd v2 rendezvous: its state, its transitions and its patience."""
