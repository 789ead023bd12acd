"""etcd v3 as the rendezvous uses it: the client, and what is built on it.

Importing this package imports grpc, as `forking` needs it to be imported.
"""

from elasticjob_rendezvous.etcd import forking as forking
