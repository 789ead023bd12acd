"""etcd v3 as the rendezvous uses it: the client, and what is built on it.

Importing this package loads nothing; `etcd.client` loads grpc.
"""
