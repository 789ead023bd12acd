"""State and decisions of the dynamic rendezvous. No I/O, clock, randomness or torch."""
