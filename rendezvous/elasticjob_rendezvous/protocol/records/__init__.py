"""Records of a rendezvous in etcd: values, keys and encoding. No I/O."""
