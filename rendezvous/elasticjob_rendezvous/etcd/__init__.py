"""etcd v3 client and the rendezvous driver, member and handler built on it.

Importing this package imports grpc through `forking`, which sets grpc's options first.
"""

from elasticjob_rendezvous.etcd import forking as forking
