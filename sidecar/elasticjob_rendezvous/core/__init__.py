"""The rendezvous protocol as pure values and step functions: no I/O, clock or environment."""
