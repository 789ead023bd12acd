"""Access to etcd: certificates of the bundled etcd and their rotation, one user for each job."""
