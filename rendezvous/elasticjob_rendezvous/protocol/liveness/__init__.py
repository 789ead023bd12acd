"""Failure detection between the members of a rendezvous, and self-fencing. No I/O."""
