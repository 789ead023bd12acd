"""Elastic rendezvous of ElasticJob: a library that does not depend on Kubernetes.

`api` holds the interface of torch's rendezvous modules; `protocol` the protocol, without I/O;
`etcd` the client and the driver that run the protocol on etcd v3.
"""
