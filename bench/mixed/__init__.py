"""Gangs in which torchrun's nodes and ours share one run, put through changes of membership."""
