"""Bugs planted in the real engine, which the simulation must find."""
