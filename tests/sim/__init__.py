"""Deterministic simulation of the rendezvous: the real protocol in a simulated world."""
