"""Domain logic of the operator: functions from the observed state of a job to plan and status.

No I/O, and no clock is read. The same plan serves pods on Kubernetes and processes on one machine.
"""
