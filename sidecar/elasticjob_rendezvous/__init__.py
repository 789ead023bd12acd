"""The elastic rendezvous of ElasticJob: a library of its own, with no Kubernetes in it.

`api` holds what users of torch's rendezvous modules know; `core` the pure
protocol; `etcd` the edge that runs it on a real etcd v3.
"""
