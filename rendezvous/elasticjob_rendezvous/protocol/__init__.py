"""Rendezvous protocol as values and step functions: no I/O, no clock, no environment."""
