"""What is to be done with a job: pure functions from what is to what shall be.

Nothing here does I/O or reads a clock. The same plan serves pods on Kubernetes and processes on
one machine.
"""
