"""The launcher: starts, signals and reaps a node's workers on the word of the agent.

It runs in the training container, so it needs nothing but Python 3.8 and its standard library; it
is shipped as one zip file. It decides nothing about the job.
"""
