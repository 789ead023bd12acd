"""Observed state of a job, read from Pod and Node objects, etcd records, agents' reports and
the job's status. No I/O."""
