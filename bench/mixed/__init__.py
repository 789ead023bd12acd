"""Gangs of torchrun's nodes and ours in one run, with changes of membership."""
