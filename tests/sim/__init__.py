"""A deterministic simulation of the rendezvous: the real protocol, a simulated world."""
