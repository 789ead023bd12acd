"""The dynamic rendezvous as values and decisions: no I/O, no clock, no chance, no torch."""
