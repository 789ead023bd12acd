"""Real network partitions: nodes in network namespaces, with real etcd, agents and workers.

`python -m tests.partitions` draws runs from seeds, cuts nodes off, injects faults into their
agents, and checks the workers' own logs: no worker of a round may write after a worker of a later
round has started.
"""
