"""Launcher: starts, signals and reaps a node's workers on the agent's orders.

Runs in the training container, so it needs only Python 3.8 and its standard library, and is
shipped as one zip file. It makes no decisions about the job.
"""
